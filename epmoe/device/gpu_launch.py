"""Launches: compiled code loaded for a GPU, and its launches with their arguments packed, to be started again.

A launch through Numba costs four to ten times as much as one through the driver.
"""

import ctypes
import struct
from array import array

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
        self.name, self.max_threads, self.n_words = kernel.name, kernel.max_threads, kernel.n_words
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
        """How many blocks of `threads` threads a multiprocessor holds at once."""
        key = (threads, shared_bytes)
        if key not in self._occupancy:
            self.allow_shared(shared_bytes)
            self._occupancy[key] = check(
                cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared_bytes)
            )
        return self._occupancy[key]


class Launch:
    """A launch of one kernel, to be started as often as one likes; the driver copies the arguments before that returns.

    words: of params. The first ones are given when it is prepared; the others are stored into `words`, or given to
    start(), before each start.
    """

    __slots__ = ("words", "_machine", "_pack", "_at", "_pointers", "_start", "_call")

    def __init__(self, machine, kernel, grid, threads, words, num_tokens, my_rank, stream, **how):
        shared_bytes, attributes = how["shared_bytes"], how["attributes"]
        n_words = kernel.n_words or 1
        self._machine, self._at = machine, 8 * len(words)
        self.words = array("Q", [*words, *[0] * (n_words + 1 - len(words))])  # never resized
        self._pack = struct.Struct("%dQ" % (n_words - len(words))).pack_into
        struct.pack_into("2i", self.words, 8 * n_words, num_tokens, my_rank)
        base, _ = self.words.buffer_info()
        places = [*range(0, 8 * n_words + 4, 8), 8 * n_words + 4]
        self._pointers = (ctypes.c_void_p * len(places))(*(base + at for at in places))
        pointers, function = ctypes.addressof(self._pointers), kernel.function
        if not attributes:
            self._start = cu.cuLaunchKernel
            self._call = (function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)
            return
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._start, self._call = cu.cuLaunchKernelEx, (config, function, pointers, 0)

    def start(self, *words):
        """Put it on its stream; inside hold() of the machine, at its end."""
        if words:
            self._pack(self.words, self._at, *words)
        machine = self._machine
        if machine.held:
            machine.queue(self.submit)
            return
        machine.enter()
        result = self._start(*self._call)
        if result[0] is not SUCCESS:
            check(result)

    def submit(self):
        """Put it on its stream now."""
        check(self._start(*self._call))


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
