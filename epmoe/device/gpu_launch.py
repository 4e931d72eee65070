"""Loads compiled code for a GPU, and launches it with packed arguments.

A launch through Numba costs four to ten times as much as one through the driver.
"""

import ctypes
import struct
from array import array

from .gpu_driver import SUCCESS, check, cu

STATIC_SHARED_LIMIT = 48 * 1024


class LoadedKernel:
    """A kernel on the current GPU, of compute capability cc, ready to be launched. It is never unloaded."""

    def __init__(self, kernel, cc):
        self.n_words = kernel.n_words
        entry, cubin = kernel.binary(cc)
        library = check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        if kernel.shmem:  # NVSHMEM, which must be initialised, sets up its device side
            from nvshmem import bindings

            bindings.culibrary_init(int(library))
        # this also loads the code now, not while other kernels spin
        code = check(cu.cuLibraryGetKernel(library, entry.encode()))
        self.function = check(cu.cuKernelGetFunction(code))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self.static_shared = check(cu.cuFuncGetAttribute(attribute, self.function))
        self.dynamic_limit = STATIC_SHARED_LIMIT - self.static_shared

    def blocks_per_sm(self, threads, shared_bytes=0):
        """How many blocks of `threads` threads a multiprocessor holds at once. Allows launches this shared memory."""
        # more than 48 KB of shared memory must be requested once
        if shared_bytes > self.dynamic_limit:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(self.function, attribute, shared_bytes))
            self.dynamic_limit = shared_bytes
        return check(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared_bytes))


class Launch:
    """A launch of one kernel that can be started repeatedly. start() copies the arguments before it returns.

    words: of params; any may be stored between starts. Those that are not given when the launch is prepared may also be
    given to start(). programmatic: it may begin before the previous launch has ended.
    """

    __slots__ = ("words", "_machine", "_pack", "_at", "_places", "_call")

    def __init__(self, machine, kernel, shape, words, numbers, stream, programmatic):
        grid, threads, shared_bytes = shape
        n_more = max(0, (kernel.n_words or 1) - len(words))
        self._machine, self._at = machine, 8 * len(words)
        numbers = [n & 0xFFFFFFFF for n in numbers]  # they are i32
        self.words = array("Q", [*words, *[0] * n_more, *numbers])  # never resized
        self._pack = struct.Struct("%dQ" % n_more).pack_into
        # the form in which the driver takes arguments: an array of their addresses
        base, n = self.words.buffer_info()
        self._places = (ctypes.c_void_p * n)(*range(base, base + 8 * n, 8))
        places = ctypes.addressof(self._places)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        if programmatic:
            serialization = cu.CUlaunchAttribute()
            serialization.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            serialization.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [serialization], 1
        # a call takes 4.5 us; cuLaunchKernel converts eleven arguments and takes 5.4
        self._call = config, kernel.function, places, 0

    def start(self, *words):
        """Put it on its stream; inside the machine's hold(), when hold() ends."""
        if words:
            self._pack(self.words, self._at, *words)
        machine = self._machine
        if machine.held:
            machine.waiting.append(self.submit)
            return
        if cu.cuLaunchKernelEx(*self._call)[0] is not SUCCESS:
            machine.activate()  # the default stream belongs to the thread's current context
            self.submit()

    def submit(self):
        """Put it on its stream now."""
        check(cu.cuLaunchKernelEx(*self._call))
