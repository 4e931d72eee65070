"""GpuMachine: the host side of the device layer on a CUDA GPU. Buffers, streams, launches.

Numba compiles kernels and owns the (primary) context; memory, streams and launches go straight to the driver, since a
launch through Numba costs four to ten times as much. Every Buffer is one whole allocation of cuMemAlloc, so that its
CUDA IPC handle is its own.
"""
import contextlib
import ctypes
import os

import numpy as np

from epmoe_ref.errors import EPError, EPValueError, UnavailableError

# virtual ranks wait for each other: all of their streams must advance
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# loading code while kernels wait for each other could hang
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

from cuda.bindings import driver as cu                          # noqa: E402

STATIC_SHARED_LIMIT = 48 * 1024
SUCCESS = cu.CUresult.CUDA_SUCCESS
NOT_CAPTURING = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
LEGACY_DEFAULT = (0, 1)     # handles of the legacy default stream: null and CU_STREAM_LEGACY


def check(result):
    """The values of a driver call, or an error with its name."""
    code = result[0]
    if code != SUCCESS:
        _, name = cu.cuGetErrorName(code)
        _, text = cu.cuGetErrorString(code)
        decode = (lambda b: b.decode() if isinstance(b, bytes) else str(b))
        raise EPError("CUDA: %s (%s)" % (decode(name), decode(text)))
    return result[1] if len(result) == 2 else result[1:] or None


_libraries = []         # loaded code, which lives as long as the process


def load_cubin(cubin, name, introduce=None):
    """The CUkernel of that name out of compiled code. introduce: called with the loaded library's handle (int) first."""
    library = check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    _libraries.append(library)
    if introduce is not None:
        introduce(int(library))
    return check(cu.cuLibraryGetKernel(library, name.encode()))


class LoadedKernel:
    """A kernel on the current GPU, ready to be launched."""

    def __init__(self, kernel):
        self.name, self.max_threads = kernel.name, kernel.max_threads
        handle = kernel.handle()
        if isinstance(handle, cu.CUfunction):
            self.function = handle
        else:                                       # this also loads the code now, not while others spin
            self.function = check(cu.cuKernelGetFunction(cu.CUkernel(int(handle))))
        attribute = cu.CUfunction_attribute
        self.static_shared = check(cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function))
        self.dynamic_limit = STATIC_SHARED_LIMIT - self.static_shared
        self._occupancy = {}

    def allow_shared(self, shared_bytes):
        """More than 48 KB of dynamic shared memory must be asked for once."""
        if shared_bytes > self.dynamic_limit:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(self.function, attribute, shared_bytes))
            self.dynamic_limit = shared_bytes

    def blocks_per_sm(self, threads, shared_bytes):
        key = (threads, shared_bytes)
        if key not in self._occupancy:
            self.allow_shared(shared_bytes)
            self._occupancy[key] = check(
                cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared_bytes))
        return self._occupancy[key]


class Launch:
    """A launch with all its arguments packed, for start() as often as one likes.

    args: (params, num_tokens, my_rank), and what else the kernel takes; the driver copies them before start() returns.
    """

    __slots__ = ("_fields", "_pointers", "_start", "_call")

    def __init__(self, function, grid, threads, args, stream, shared_bytes, attributes=None):
        params, num_tokens, my_rank, *others = args
        self._fields = (ctypes.c_uint64(params), ctypes.c_int32(num_tokens), ctypes.c_int32(my_rank),
                        *map(ctypes.c_uint64, others))
        self._pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(f) for f in self._fields))
        arguments = ctypes.addressof(self._pointers)
        if not attributes:
            self._start = cu.cuLaunchKernel
            self._call = (function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)
            return
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._start, self._call = cu.cuLaunchKernelEx, (config, function, arguments, 0)

    def start(self):
        """Put it on its stream."""
        result = self._start(*self._call)
        if result[0] != SUCCESS:
            check(result)


def launch_attributes(cooperative, programmatic):
    """Driver attributes of a launch whose blocks are all resident, or that may begin before its predecessor ends."""
    out = []
    if cooperative:
        a = cu.CUlaunchAttribute()
        a.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        a.value.cooperative = 1
        out.append(a)
    if programmatic:
        a = cu.CUlaunchAttribute()
        a.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        a.value.programmaticStreamSerializationAllowed = 1
        out.append(a)
    return out


_loaded = {}            # (device, kernel) -> LoadedKernel


def loaded(kernel):
    """The kernel compiled and loaded for the current GPU."""
    from numba import cuda
    key = (cuda.current_context().device.id, kernel)
    if key not in _loaded:
        _loaded[key] = LoadedKernel(kernel)
    return _loaded[key]


def resident_blocks(kernel, threads, shared_bytes=0):
    """How many blocks of this kernel the current GPU holds at once."""
    from numba import cuda
    return loaded(kernel).blocks_per_sm(threads, shared_bytes) * cuda.current_context().device.MULTIPROCESSOR_COUNT


@contextlib.contextmanager
def outside_capture():
    """Driver calls inside take place now, even while a stream of this thread is captured into a graph.

    Only for calls that the captured work does not depend on the order of: new memory, copies into it.
    """
    before = check(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before))


class Buffer:
    """Device memory: one whole allocation, its contents unspecified until written."""

    def __init__(self, machine, nbytes, name, rank, regions):
        self.machine, self.nbytes, self.name, self.rank, self.regions = machine, int(nbytes), name, rank, regions
        with outside_capture():
            self.address = int(check(cu.cuMemAlloc(max(self.nbytes, 1))))

    def _inside(self, offset, nbytes):
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise EPValueError("bytes %d to %d of %s, which has %d bytes"
                               % (offset, offset + nbytes, self.name, self.nbytes))

    def write(self, array, offset=0):
        """Copy an array into the buffer, from byte `offset` on; returns when it is there."""
        source = np.ascontiguousarray(array)
        self._inside(offset, source.nbytes)
        if source.nbytes:
            copies = self.machine.copies
            self.machine.activate()
            with outside_capture():
                check(cu.cuMemcpyHtoDAsync(self.address + offset, source.ctypes.data, source.nbytes, copies))
                check(cu.cuStreamSynchronize(copies))

    def read(self, dtype, shape, offset=0):
        """A copy of part of the buffer as a NumPy array, after all launches have ended."""
        out = np.empty(shape, dtype)
        self._inside(offset, out.nbytes)
        self.machine.synchronize()
        if out.nbytes:
            check(cu.cuMemcpyDtoHAsync(out.ctypes.data, self.address + offset, out.nbytes, self.machine.copies))
            check(cu.cuStreamSynchronize(self.machine.copies))
        return out

    def fill(self, byte, offset=0, nbytes=None):
        """Set bytes to one value; returns when it is done."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self._inside(offset, nbytes)
        if nbytes:
            self.machine.activate()
            check(cu.cuMemsetD8Async(self.address + offset, byte, nbytes, self.machine.copies))
            check(cu.cuStreamSynchronize(self.machine.copies))

    def array(self, dtype, shape, offset=0):
        """Part of the buffer as an object with __cuda_array_interface__."""
        dtype = np.dtype(dtype)
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        self._inside(offset, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return DeviceArray(self, self.address + offset, shape, dtype)

    def free(self):
        """Give the memory back, after all launches have ended."""
        if self.address:
            self.machine.synchronize()
            check(cu.cuMemFree(self.address))
            self.address = 0
            self.machine.n_freed += 1


class DeviceArray:
    """Memory of a Buffer that other libraries can look at; it keeps the Buffer object."""

    def __init__(self, buffer, address, shape, dtype):
        self.buffer, self.address, self.shape, self.dtype = buffer, address, shape, dtype

    @property
    def __cuda_array_interface__(self):
        typestr = self.dtype.str if self.dtype.kind != "V" else "|V%d" % self.dtype.itemsize
        return dict(shape=self.shape, typestr=typestr, data=(self.address, False), version=3, strides=None)


def new_stream():
    """A stream that waits for no other."""
    return check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))


class Stream:
    """Launches of one rank that run one after another. Wraps a stream of the caller, or makes one."""

    def __init__(self, machine, rank, handle=None):
        self.machine, self.rank = machine, rank
        self.own = handle is None
        self.handle = new_stream() if self.own else cu.CUstream(int(handle))
        self._is_legacy_default = int(self.handle) in LEGACY_DEFAULT
        self._event = None

    def capture(self):
        """The id of the capture into a CUDA graph that the stream is in, 0 for none."""
        if self._is_legacy_default:         # cannot be captured
            return 0
        code, status = cu.cuStreamIsCapturing(self.handle)
        if code == SUCCESS and status == NOT_CAPTURING:
            return 0
        check((code, status))
        self.machine.has_captured = True
        return int(check(cu.cuStreamGetCaptureInfo(self.handle))[1])

    def wait(self, other):
        """What comes after this on the stream begins when all that is on the other stream now has ended."""
        self.machine.activate()         # threads of torch's autograd come without a context, which default streams need
        if other._event is None:
            other._event = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        check(cu.cuEventRecord(other._event, other.handle))
        check(cu.cuStreamWaitEvent(self.handle, other._event, 0))

    def synchronize(self):
        """Wait until everything on it has ended."""
        self.machine.activate()
        self.machine.submit()
        check(cu.cuStreamSynchronize(self.handle))


class GpuMachine:
    """One GPU: shared by all n_ranks virtual ranks of this process, or (with `rank`) this process's.

    ordinal: which GPU; left out, the current one. The simulator's arguments (seed, racecheck, ...) have no meaning here
    and are ignored, so that one call makes either machine; n_sms limits the multiprocessors that grids may count on.
    """

    is_simulator = False

    def __init__(self, n_ranks=1, *, rank=None, ordinal=None, n_sms=None, seed=None, racecheck=None, **simulator_only):
        from numba import cuda
        try:
            if ordinal is not None:
                cuda.select_device(ordinal)
            context = cuda.current_context()
        except Exception as error:
            raise UnavailableError("no CUDA GPU can be used (%s); EPMOE_DEVICE=sim runs the simulator instead"
                                   % error) from error
        self.n_ranks, self.rank = n_ranks, rank
        self.ranks_here = n_ranks if rank is None else 1
        self._context = check(cu.cuCtxGetCurrent())
        device = context.device
        self.ordinal = device.id
        self.name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
        self.compute_capability = tuple(device.compute_capability)
        self.all_sms = device.MULTIPROCESSOR_COUNT
        self.n_sms = self.all_sms if n_sms is None else min(int(n_sms), self.all_sms)
        self.shared_limit = check(cu.cuDeviceGetAttribute(
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, self.ordinal))
        self.copies = new_stream()
        self.streams = []
        self.held = 0
        self.n_freed = 0            # Buffers freed so far: what was packed before may name memory that is gone
        self.has_captured = False   # graphs may name memory that nothing here uses any more
        self.recorded = None        # a list, while launches are also to be kept for start()
        self._queue = []
        self._adopted = {}

    def describe(self):
        """One line about the machine."""
        return "%s, %d multiprocessors%s" % (
            self.name, self.all_sms, ", shared by %d virtual ranks" % self.ranks_here if self.ranks_here > 1 else "")

    def activate(self):
        """Make this machine's context the thread's current one."""
        check(cu.cuCtxSetCurrent(self._context))

    # ------------------------------------------------------------------ memory
    def alloc(self, nbytes, name, rank=0, *, regions=None):
        """A new Buffer of device memory (256-byte aligned, a whole allocation)."""
        self.activate()
        return Buffer(self, nbytes, name, rank, regions)

    def adopt(self, array, name, rank=0, *, regions=None):
        """Device address of the caller's array, from its __cuda_array_interface__; nothing is copied."""
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise EPValueError("%s is not in the GPU's memory: give an array with __cuda_array_interface__" % name)
        address = interface["data"][0]
        self._adopted[address] = array
        return address

    def release(self, address):
        """End one adopt()."""
        self._adopted.pop(address, None)

    # ------------------------------------------------------------------ launches
    def stream(self, rank=0, handle=None):
        """A new stream of this rank, or the caller's stream with this CUstream handle."""
        self.activate()
        s = Stream(self, rank, handle)
        self.streams.append(s)
        return s

    def max_resident_blocks(self, kernel, threads, shared_bytes=0):
        """How many blocks of this kernel the GPU holds at once: ranks whose kernels wait for each other share them."""
        self.activate()
        return loaded(kernel).blocks_per_sm(threads, shared_bytes) * self.n_sms

    def prepare(self, kernel):
        """Compile and load a kernel now: doing so while other kernels wait for each other could hang."""
        self.activate()
        return loaded(kernel)

    def launch(self, kernel, grid, block, args, *, stream, shared_bytes=0, cooperative=False, programmatic=False):
        """Start grid blocks of `block` threads on a stream; inside hold(), at its end."""
        k = self.prepare(kernel)
        grid, block = int(grid), int(block)
        if not 1 <= block <= k.max_threads:
            raise EPValueError("block=%d threads: %s takes 1 to %d" % (block, k.name, k.max_threads))
        if grid < 1:
            raise EPValueError("grid=%d blocks of %s: at least 1 is needed" % (grid, k.name))
        if k.static_shared + shared_bytes > self.shared_limit:
            raise EPValueError("shared_bytes=%d of %s: a block has at most %d"
                               % (shared_bytes, k.name, self.shared_limit))
        limit = k.blocks_per_sm(block, shared_bytes) * self.n_sms
        if grid > limit:
            raise EPValueError("grid=%d blocks of %d threads of %s cannot be resident at once: %d multiprocessors "
                               "hold %d; blocks wait for each other, so take a smaller grid"
                               % (grid, block, k.name, self.n_sms, limit))
        k.allow_shared(shared_bytes)
        attributes = launch_attributes(cooperative, programmatic) if cooperative or programmatic else None
        launch = Launch(k.function, grid, block, args, stream.handle, shared_bytes, attributes)
        if self.recorded is not None:
            self.recorded.append(launch)
        if self.held:
            self._queue.append(launch)
        else:
            launch.start()

    @contextlib.contextmanager
    def recording(self):
        """Gives a list of the launches inside, for start()."""
        self.recorded = launches = []
        try:
            yield launches
        finally:
            self.recorded = None

    def start(self, launches):
        """Start launches that were recorded once more."""
        check(cu.cuCtxSetCurrent(self._context))
        for launch in launches:
            launch.start()

    def submit(self):
        """Start what hold() holds back."""
        queue, self._queue = self._queue, []
        for launch in queue:
            launch.start()

    def synchronize(self):
        """Wait until every launch on this machine's streams has ended."""
        self.activate()
        self.submit()
        for s in self.streams:
            check(cu.cuStreamSynchronize(s.handle))

    @contextlib.contextmanager
    def hold(self):
        """Launches inside start together when the outermost block ends, compiled by then; an exception drops them."""
        self.held += 1
        try:
            yield self
        except BaseException:
            self._queue = []
            raise
        finally:
            self.held -= 1
        if not self.held:
            self.activate()
            self.submit()
