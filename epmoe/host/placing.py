"""Gives kernels the caller's arrays: device memory in place, host memory adopted (simulator) or staged (GPU)."""

import math

import numpy as np

from epmoe import device
from epmoe.device.cast_ids import cast_ids
from epmoe.host.arrays import VECTOR_BYTES, Array, view
from epmoe_ref.errors import EPValueError


class Placing:
    """Places the arrays of one ExpertParallel by name. A new array replaces the earlier one of its name.

    In the simulator an array is used in place if it is C-contiguous and starts at a multiple of 16 bytes, or else
    copied. Its exact bounds are known, so reads past its end are caught. On a GPU a host array is copied into a staging
    buffer, which is kept and grows; device arrays are used in place.
    """

    def __init__(self, machine, stream_of):
        self.machine, self._stream_of = machine, stream_of
        self.placed = {}  # (rank, name) -> (address or None, owner of the memory)
        self._staging = {}  # (rank, name) -> Buffer
        self._outgrown = []  # staging buffers that CUDA graphs may use
        self._casts = {}  # (rank, dtype, count) -> launch

    def place(self, rank, name, array, dtype=None) -> int:
        """Address of an array's elements in C order. dtype: what kernels read; in device memory only int32 is made."""
        if type(array) is not Array:
            array = view(array, name)
        if array.host is None:
            self.placed[rank, name] = None, array.owner
            if dtype is None or array.dtype == dtype:
                return array.address
            return self._cast(rank, name, array)
        host = np.ascontiguousarray(array.host, dtype)
        if device.SIM:
            return self._adopted(rank, name, host)
        self._expect_no_capture(rank, name)
        # Earlier launches may still read the staging buffer.
        self.machine.synchronize()
        buffer = self._buffer(rank, name, host.nbytes)
        if host.nbytes:
            buffer.write(host)
        return buffer.address

    def place_all(self, rank, names, arrays, dtypes):
        """[address of each array]. dtypes: {name: dtype} for arrays that need a certain dtype."""
        return [self.place(rank, name, a, dtypes.get(name)) for name, a in zip(names, arrays)]

    def fill_in(self, unplaced):
        """Place arrays, [(words, index, rank, name, array, dtype if any)], and store each address in words[index]."""
        for words, i, *what in unplaced:
            words[i] = self.place(*what)

    def _expect_no_capture(self, rank, name):
        if self.machine.has_captured and self._stream_of(rank).capture():
            raise EPValueError(
                f"{name} of rank {rank} is in host memory, and the stream is being captured into a CUDA graph, whose "
                "replays would not see it: give an array in GPU memory"
            )

    def fetch(self, rank, name, host):
        """Copy a placed array that kernels have written back into `host`, the caller's array; they must have ended."""
        if not device.SIM:
            host[...] = self._staging[rank, name].read(host.dtype, host.shape)
        elif (used := self.placed[rank, name][1]) is not host:
            host[...] = used

    def _adopted(self, rank, name, host):
        self.let_go((rank, name))
        if host.ctypes.data % VECTOR_BYTES:
            host = _aligned_copy(host)
        try:
            address = self.machine.adopt(host, name, rank)
        except EPValueError:  # another array of the caller begins there and is longer or shorter
            host = _aligned_copy(host)
            address = self.machine.adopt(host, name, rank)
        self.placed[rank, name] = address, host
        return address

    def _cast(self, rank, name, array):
        """Cast ids in device memory to int32 by a launch; returns the address of the result."""
        # Earlier launches that may still read the buffer precede this one on the stream.
        n = math.prod(array.shape)
        to, key = self._buffer(rank, f"int32 {name}", 4 * n).address, (rank, array.dtype, n)
        if key not in self._casts:
            self._casts[key] = cast_ids(self.machine, self._stream_of(rank), rank, array.dtype, n)
        self._casts[key].start(array.address, to)
        return to

    def _buffer(self, rank, name, nbytes):
        buffer = self._staging.get((rank, name))
        if buffer is None or buffer.nbytes < nbytes:
            outgrown, buffer = buffer, self.machine.alloc(max(nbytes, 256), f"staged {name}", rank)
            self._staging[rank, name] = buffer
            if outgrown is not None:
                self._outgrown.append(outgrown) if self.machine.has_captured else outgrown.free()
        return buffer

    def let_go(self, *keys):
        """Release the caller's arrays with these keys (rank, name), or all; the kernels must have ended."""
        for key in keys or list(self.placed):
            address, _ = self.placed.pop(key, (None, None))
            if address is not None:
                self.machine.release(address)

    def close(self):
        """Release all arrays and free the staging buffers; the kernels must have ended."""
        self.let_go()
        for buffer in (*self._staging.values(), *self._outgrown):
            buffer.free()
        self._staging, self._outgrown = {}, []

    def staged_bytes(self, rank):
        """Bytes of a rank's staging buffers."""
        return sum(buffer.nbytes for (of, _), buffer in self._staging.items() if of == rank)


def _aligned_copy(a):
    raw = np.empty(a.nbytes + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    copy = raw[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy
