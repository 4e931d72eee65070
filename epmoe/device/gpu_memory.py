"""Device memory. Every Buffer is one whole allocation of cuMemAlloc, so its CUDA IPC handle covers nothing else.

HostMemory is host memory that kernels write.
"""

import ctypes
import math
from types import SimpleNamespace

import numpy as np

from epmoe_ref.errors import EPValueError

from .gpu_driver import check, cu, outside_capture


class Buffer:
    """Device memory: one whole allocation. Its contents are unspecified until written."""

    def __init__(self, machine, nbytes, name, rank, regions):
        self.machine, self.nbytes = machine, int(nbytes)
        self.name, self.rank, self.regions = name, rank, regions
        with outside_capture():
            self.address = int(check(cu.cuMemAlloc(max(self.nbytes, 1))))

    def _inside(self, offset, nbytes):
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            end = offset + nbytes
            raise EPValueError(f"bytes {offset} to {end} of {self.name}, which has {self.nbytes} bytes")

    def _at_once(self, function, *arguments):
        """Call a driver function that copies or sets memory. Returns when it has finished."""
        copies = self.machine.copies
        self.machine.activate()
        with outside_capture():
            check(function(*arguments, copies))
            check(cu.cuStreamSynchronize(copies))

    def write(self, array, offset=0):
        """Copy an array into the buffer, from byte `offset` on. Returns when the copy is complete."""
        source = np.ascontiguousarray(array)
        self._inside(offset, source.nbytes)
        if source.nbytes:
            to = self.address + offset
            self._at_once(cu.cuMemcpyHtoDAsync, to, source.ctypes.data, source.nbytes)

    def read(self, dtype, shape, offset=0):
        """A copy of part of the buffer as a NumPy array, after all launches have ended."""
        out = np.empty(shape, dtype)
        self._inside(offset, out.nbytes)
        self.machine.synchronize()
        if out.nbytes:
            source = self.address + offset
            self._at_once(cu.cuMemcpyDtoHAsync, out.ctypes.data, source, out.nbytes)
        return out

    def fill(self, byte, offset=0, nbytes=None):
        """Set bytes to one value. Returns when it is done."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self._inside(offset, nbytes)
        if nbytes:
            self._at_once(cu.cuMemsetD8Async, self.address + offset, byte, nbytes)

    def array(self, dtype, shape, offset=0):
        """Part of the buffer for other libraries: address, shape, dtype, buffer and __cuda_array_interface__."""
        dtype, address = np.dtype(dtype), self.address + offset
        shape = tuple(map(int, np.atleast_1d(shape)))
        self._inside(offset, math.prod(shape) * dtype.itemsize)
        typestr = dtype.str if dtype.kind != "V" else "|V%d" % dtype.itemsize
        interface = dict(shape=shape, typestr=typestr, data=(address, False), version=3)
        made = SimpleNamespace(buffer=self, address=address, shape=shape, dtype=dtype)
        made.__cuda_array_interface__ = interface
        return made

    def free(self):
        """Free the memory, after all launches have ended."""
        if self.address:
            self.machine.synchronize()
            check(cu.cuMemFree(self.address))
            self.address = 0


class HostMemory:
    """Page-locked host memory, zeroed, which kernels of all GPUs reach at the same address."""

    def __init__(self, machine, nbytes):
        self._machine, self.nbytes = machine, int(nbytes)
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        with outside_capture():
            self.address = int(check(cu.cuMemHostAlloc(self.nbytes, flags)))
        self._bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.address), np.uint8)
        self._bytes[:] = 0

    def array(self, dtype, n):
        """The first n elements as a NumPy array. It must not be used after free()."""
        return self._bytes[: n * np.dtype(dtype).itemsize].view(dtype)

    def free(self):
        """Free the memory, after all launches have ended."""
        if self.address:
            self._machine.synchronize()
            check(cu.cuMemFreeHost(self.address))
            self.address = 0
