"""Memory that kernels use: on the device, and on the host."""

import ctypes

import numpy as np

from epmoe_ref.errors import EPValueError

from .gpu_driver import check, cu, outside_capture


class Buffer:
    """Device memory: one whole allocation, so that a CUDA IPC handle covers nothing else. Unspecified until written."""

    def __init__(self, machine, nbytes, name):
        self.machine, self.nbytes, self.name = machine, int(nbytes), name
        with outside_capture():
            self.address = int(check(cu.cuMemAlloc(max(self.nbytes, 1))))

    def _inside(self, offset, nbytes):
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            end = offset + nbytes
            raise EPValueError(f"bytes {offset} to {end} of {self.name}, which has {self.nbytes} bytes")

    def _at_once(self, function, to, source, nbytes):
        """Call a driver function that copies or sets nbytes, if there are any. Returns when it has finished."""
        if not nbytes:
            return
        copies = self.machine.copies
        self.machine.activate()
        with outside_capture():
            check(function(to, source, nbytes, copies))
            check(cu.cuStreamSynchronize(copies))

    def write(self, array, offset=0):
        """Copy an array into the buffer, from byte `offset` on. Returns when the copy is complete."""
        source = np.ascontiguousarray(array)
        self._inside(offset, source.nbytes)
        self._at_once(cu.cuMemcpyHtoDAsync, self.address + offset, source.ctypes.data, source.nbytes)

    def read(self, dtype, shape, offset=0):
        """A copy of part of the buffer as a NumPy array, after all launches have ended."""
        out = np.empty(shape, dtype)
        self._inside(offset, out.nbytes)
        self.machine.synchronize()
        self._at_once(cu.cuMemcpyDtoHAsync, out.ctypes.data, self.address + offset, out.nbytes)
        return out

    def fill(self, byte, offset=0, nbytes=None):
        """Set bytes to one value. Returns when it is done."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self._inside(offset, nbytes)
        self._at_once(cu.cuMemsetD8Async, self.address + offset, byte, nbytes)

    def free(self):
        """Free the memory, after all launches have ended."""
        if self.address:
            self.machine.synchronize()
            check(cu.cuMemFree(self.address))
            self.address = 0


class HostMemory:
    """Page-locked host memory, which kernels of all GPUs reach at the same address."""

    def __init__(self, machine, nbytes):
        self._machine, self._nbytes = machine, nbytes
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        with outside_capture():
            self.address = int(check(cu.cuMemHostAlloc(nbytes, flags)))

    def array(self, dtype, n):
        """The first n elements as a NumPy array. It must not be used after free()."""
        return np.frombuffer((ctypes.c_uint8 * self._nbytes).from_address(self.address), dtype, n)

    def free(self):
        """Free the memory, after all launches have ended."""
        if self.address:
            self._machine.synchronize()
            check(cu.cuMemFreeHost(self.address))
            self.address = 0
