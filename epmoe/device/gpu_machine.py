"""GpuMachine: the host side of the device layer on a CUDA GPU. Streams, buffers, launches.

Numba compiles kernels and owns the (primary) context. Memory, streams and launches use the driver directly.
"""

import contextlib
import os
import time

from epmoe.capability import OLDEST
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

from . import launch_shape
from .forks import belongs_here
from .gpu_driver import check, cu
from .gpu_launch import Launch, LoadedKernel
from .gpu_memory import Buffer, HostMemory

NOT_CAPTURING = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
LEGACY_DEFAULT = (0, 1)  # handles of the legacy default stream: null and CU_STREAM_LEGACY
# wait_for polls LOOKS times, yields for YIELDING s, then sleeps PAUSE s between polls and asks the driver every ASKING s
LOOKS, YIELDING, PAUSE, ASKING = 300, 1e-3, 5e-5, 1e-3


def new_stream():
    """A stream that does not synchronise with the default stream."""
    return check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))


class Stream:
    """Launches of one rank that run one after another. Wraps a stream of the caller, or makes one."""

    def __init__(self, machine, rank, handle=None):
        self.machine, self.rank = machine, rank
        self.handle = new_stream() if handle is None else cu.CUstream(int(handle))
        self.can_be_captured = int(self.handle) not in LEGACY_DEFAULT
        self._event, self._beside = None, {}  # handle -> Stream

    def capture(self):
        """The id of the CUDA graph capture that the stream is in, 0 for none."""
        if not self.can_be_captured:
            return 0
        seen = cu.cuStreamIsCapturing(self.handle)
        if seen[1] is NOT_CAPTURING:
            return 0
        check(seen)
        self.machine.has_captured = True
        return int(check(cu.cuStreamGetCaptureInfo(self.handle))[1])

    def beside(self, handle):
        """Another stream of the caller, as a Stream. Calls of this rank wait for it and make it wait."""
        if handle not in self._beside:
            self._beside[handle] = Stream(self.machine, self.rank, handle)
        return self._beside[handle]

    def wait(self, other):
        """Make later work on this stream wait until all work now on the other stream has ended."""
        self.machine.activate()  # threads of torch's autograd have no context, and default streams need one
        if other._event is None:
            other._event = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        check(cu.cuEventRecord(other._event, other.handle))
        check(cu.cuStreamWaitEvent(self.handle, other._event, 0))

    def wait_for(self, word, number, seconds):
        """Poll word[0], which a kernel on the stream stores, until it equals number. False if that takes too long."""
        for _ in range(LOOKS):
            if word[0] == number:
                return True
        begin = asked = time.monotonic()
        while word[0] != number:
            now = time.monotonic()
            if now - begin < YIELDING:
                os.sched_yield()  # without Python's lock; time.sleep(0) takes 100 us
                continue
            if now - asked > ASKING:
                asked, code = now, cu.cuStreamQuery(self.handle)[0]
                if code != NOT_READY:
                    check((code,))  # the error of a kernel that was aborted
                    if word[0] != number:
                        raise EPError(f"the stream has ended, and no kernel has stored {number}")
                if now - begin > seconds:
                    return False
            time.sleep(PAUSE)
        return True

    def synchronize(self):
        """Wait until all work on it has ended."""
        self.machine.submit()
        check(cu.cuStreamSynchronize(self.handle))


class GpuMachine:
    """One GPU, shared by all n_ranks virtual ranks of this process, or (with `rank`) used by this process's rank alone.

    ordinal: which GPU; by default the current one. The simulator's arguments (seed, racecheck, ...) are accepted and
    ignored, so one call makes either machine. n_sms limits the multiprocessors that grids may count on.
    """

    def __init__(self, n_ranks=1, *, rank=None, ordinal=None, n_sms=None, **simulator_only):
        from numba import cuda

        try:
            if ordinal is not None:
                cuda.select_device(ordinal)
            context = cuda.current_context()
        except Exception as error:
            why = " ".join(str(error).split()).strip(" :")  # numba's errors have several lines
            raise UnavailableError(
                f"no CUDA GPU can be used ({why}); EPMOE_DEVICE=sim runs the simulator instead"
            ) from error
        self.n_ranks, self.rank = n_ranks, rank
        self.context = check(cu.cuCtxGetCurrent())
        device = context.device
        self.ordinal = device.id
        self.name = device.name
        self.compute_capability = tuple(device.compute_capability)
        if self.compute_capability < OLDEST:
            raise UnavailableError(
                "GPU %d, %s, has compute capability %d.%d; the kernels need %d.%d or newer: "
                "EPMOE_DEVICE=sim runs the simulator instead"
                % (self.ordinal, self.name, *self.compute_capability, *OLDEST)
            )
        self.all_sms = device.MULTIPROCESSOR_COUNT
        self.n_sms = self.all_sms if n_sms is None else min(int(n_sms), self.all_sms)
        most_shared = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.shared_limit = check(cu.cuDeviceGetAttribute(most_shared, self.ordinal))
        self.copies = new_stream()  # for copies between host and device
        self.streams = []
        self.held = 0
        self.has_captured = False  # graphs may refer to memory that nothing here uses any more
        self.waiting = []  # functions that start the launches held back by hold()
        self._adopted = {}
        belongs_here(self)

    def describe(self):
        """One line about the machine."""
        is_shared = self.rank is None and self.n_ranks > 1
        shared = f", shared by {self.n_ranks} virtual ranks" if is_shared else ""
        return f"{self.name}, {self.all_sms} multiprocessors{shared}"

    def activate(self):
        """Make this machine's context the thread's current one."""
        check(cu.cuCtxSetCurrent(self.context))

    # ------------------------------------------------------------------ memory
    def alloc(self, nbytes, name, rank=0, *, regions=None):
        """A new Buffer of device memory (256-byte aligned, a whole allocation). rank, regions: for the simulator."""
        self.activate()
        return Buffer(self, nbytes, name)

    def host_memory(self, nbytes, name, rank=0):
        """New HostMemory."""
        self.activate()
        return HostMemory(self, nbytes)

    def adopt(self, array, name, rank=0, *, regions=None):
        """Device address of the caller's array, from its __cuda_array_interface__; nothing is copied."""
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise EPValueError(f"{name} is not in the GPU's memory: give an array with __cuda_array_interface__")
        address = interface["data"][0]
        self._adopted[address] = array
        return address

    # ------------------------------------------------------------------ launches
    def stream(self, rank=0, handle=None):
        """A new stream of this rank, or the caller's stream with this CUstream handle."""
        self.activate()
        s = Stream(self, rank, handle)
        self.streams.append(s)
        return s

    def max_resident_blocks(self, kernel, threads, shared_bytes=0):
        """How many blocks of this kernel the GPU holds at once. Ranks whose kernels wait for each other share them."""
        return self.prepare(kernel).blocks_per_sm(threads, shared_bytes) * self.n_sms

    def prepare(self, kernel):
        """Compile and load a kernel now. Doing so while other kernels wait for each other could hang."""
        self.activate()
        if self.ordinal not in kernel.loaded:
            kernel.loaded[self.ordinal] = LoadedKernel(kernel, self.compute_capability)
        return kernel.loaded[self.ordinal]

    def launch(self, kernel, grid, block, args, *, stream, **how):
        """Start grid blocks of `block` threads on a stream; inside hold(), when it ends. args: params and 2 numbers."""
        params, *numbers = args
        words = params if isinstance(params, (tuple, list)) else (params,)
        self.prepared(kernel, grid, block, words, *numbers, stream=stream, **how).start()

    def prepared(self, kernel, grid, block, words, *numbers, stream, shared_bytes=0, programmatic=False):
        """A checked and loaded Launch. Its params are `words`, then those given to start(*more).

        numbers: num_tokens and my_rank.
        """
        k = self.prepare(kernel)
        grid, block = launch_shape.checked(self, kernel, grid, block, shared_bytes, k.static_shared)
        shape = grid, block, shared_bytes
        return Launch(self, k, shape, words, numbers, stream.handle, programmatic)

    def submit(self):
        """Make this machine's context the thread's, and start the launches that hold() held back."""
        self.activate()
        waiting, self.waiting = self.waiting, []
        for start in waiting:
            start()

    def synchronize(self):
        """Wait until every launch on this machine's streams has ended."""
        self.submit()
        for s in self.streams:
            check(cu.cuStreamSynchronize(s.handle))

    @contextlib.contextmanager
    def hold(self):
        """Start the launches inside together, all compiled, when the outermost hold() ends. An exception drops them."""
        self.held += 1
        try:
            yield self
        except BaseException:
            self.waiting = []
            raise
        finally:
            self.held -= 1
        if not self.held:
            self.submit()
