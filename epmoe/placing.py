"""Where kernels find the caller's arrays: device memory as it is, host memory registered (simulator) or copied (GPU)."""

import numpy as np

from epmoe import device
from epmoe.arrays import Array

ALIGNMENT = 16  # bytes: kernels read rows as 16-byte vectors


class Placing:
    """Places the arrays of one ExpertParallel under names; a name's earlier array may go when a new one takes its place.

    In the simulator an array of the caller is used where it lies, if it is C-contiguous and begins at a multiple of 16
    bytes, with its exact bounds, so that a kernel that reads past it is caught. On a GPU a host array goes into a
    staging buffer that is kept and grows; device arrays are used where they lie.
    """

    def __init__(self, machine):
        self.machine = machine
        self._placed = {}       # (rank, name) -> (address or None, what keeps the memory alive)
        self._staging = {}      # (rank, name) -> Buffer

    def place(self, rank, name, array: Array, dtype=None, *, lent=None) -> int:
        """Address of the array's elements, C order, converted to dtype if given; lent: a Loan it may lie in already."""
        if lent is not None and lent.holds(array):
            self._hold(rank, name, None, lent)
            return array.address
        if array.host is None:
            if dtype is not None and array.dtype != dtype:
                array = self._converted(rank, name, array, dtype)
            self._hold(rank, name, None, array.owner)
            return array.address
        host = np.ascontiguousarray(array.host, dtype)
        if device.SIM:
            if host.ctypes.data % ALIGNMENT:
                host = _aligned_copy(host)
            self._hold(rank, name, None, None)
            address = self.machine.adopt(host, name, rank)
            self._hold(rank, name, address, host)
            return address
        buffer = self._staging.get((rank, name))
        # Earlier launches may still read the staging buffer.
        self.machine.synchronize()
        if buffer is None or buffer.nbytes < host.nbytes:
            if buffer is not None:
                buffer.free()
            buffer = self._staging[rank, name] = self.machine.alloc(max(host.nbytes, 256), f"staged {name}", rank)
        if host.nbytes:
            buffer.write(host)
        return buffer.address

    def _hold(self, rank, name, address, owner):
        before, _ = self._placed.get((rank, name), (None, None))
        if before is not None:
            self.machine.release(before)
        self._placed[rank, name] = (address, owner)

    def close(self):
        """Let go of all arrays and free the staging buffers."""
        for rank, name in list(self._placed):
            self._hold(rank, name, None, None)
        for buffer in self._staging.values():
            buffer.free()
        self._placed.clear()
        self._staging.clear()

    @property
    def staging_bytes(self):
        """Bytes of staging buffers by rank: {rank: bytes}."""
        by_rank = {}
        for (rank, _), buffer in self._staging.items():
            by_rank[rank] = by_rank.get(rank, 0) + buffer.nbytes
        return by_rank


def _aligned_copy(a):
    raw = np.empty(a.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    copy = raw[start:start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy
