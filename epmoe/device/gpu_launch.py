"""Launches: compiled code loaded for a GPU, and its launches with all arguments packed, to be started again and again.

A launch through Numba costs four to ten times as much as one through the driver.
"""

import ctypes

from .gpu_driver import SUCCESS, check, cu

STATIC_SHARED_LIMIT = 48 * 1024


_libraries = []  # loaded code, which lives as long as the process


def load_cubin(cubin, name, introduce=None):
    """The CUkernel of that name out of compiled code. introduce: called first, with the loaded library's int handle."""
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
        else:  # this also loads the code now, not while others spin
            self.function = check(cu.cuKernelGetFunction(cu.CUkernel(int(handle))))
        attribute = cu.CUfunction_attribute
        self.static_shared = check(
            cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function)
        )
        self.dynamic_limit = STATIC_SHARED_LIMIT - self.static_shared
        self._occupancy = {}

    def allow_shared(self, shared_bytes):
        """More than 48 KB of dynamic shared memory must be asked for once."""
        if shared_bytes > self.dynamic_limit:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(self.function, attribute, shared_bytes))
            self.dynamic_limit = shared_bytes

    def blocks_per_sm(self, threads, shared_bytes):
        """How many blocks of so many threads a multiprocessor holds at once."""
        key = (threads, shared_bytes)
        if key not in self._occupancy:
            self.allow_shared(shared_bytes)
            self._occupancy[key] = check(
                cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared_bytes)
            )
        return self._occupancy[key]


class Launch:
    """A launch with all its arguments packed, for start() as often as one likes.

    args: (params, num_tokens, my_rank), and what else the kernel takes; the driver copies them before start() returns.
    """

    __slots__ = ("_fields", "_pointers", "_start", "_call", "_words")

    def __init__(self, function, grid, threads, args, stream, shared_bytes, attributes=None):
        params, num_tokens, my_rank, *others = args
        self._fields = (
            ctypes.c_uint64(params),
            ctypes.c_int32(num_tokens),
            ctypes.c_int32(my_rank),
            *map(ctypes.c_uint64, others),
        )
        self._pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(f) for f in self._fields))
        arguments = ctypes.addressof(self._pointers)
        self._words = int(function), arguments, grid, threads, shared_bytes, int(stream)
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

    @property
    def stream(self):
        """Handle of the stream."""
        return self._words[-1]

    @property
    def values(self):
        """The arguments as ints, the address of the parameters first."""
        return [field.value for field in self._fields]

    def words(self):
        """Address of the CUlaunchConfig or 0, function, address of the arguments' addresses, blocks, threads, ..."""
        config = self._call[0] if self._start is cu.cuLaunchKernelEx else None
        return 0 if config is None else int(config.getPtr()), *self._words

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


def loaded(kernel):
    """The kernel compiled and loaded for the current GPU."""
    from numba import cuda

    number, of_devices = (
        cuda.current_context().device.id,
        kernel.loaded,
    )  # kept no longer than the kernel
    if number not in of_devices:
        of_devices[number] = LoadedKernel(kernel)
    return of_devices[number]


def resident_blocks(kernel, threads, shared_bytes=0):
    """How many blocks of this kernel the current GPU holds at once."""
    from numba import cuda

    return (
        loaded(kernel).blocks_per_sm(threads, shared_bytes)
        * cuda.current_context().device.MULTIPROCESSOR_COUNT
    )
