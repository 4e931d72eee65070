"""Reading small parts of Buffers behind the launches that write them: copies on their stream, and one wait for all."""

import ctypes
from weakref import WeakKeyDictionary

import numpy as np

from .gpu_driver import check, cu, outside_capture

STEP = 4096  # bytes


class Reading:
    """Copies into memory of the host that is pinned, so that the GPU writes it without the host's help."""

    def __init__(self, machine):
        self._machine, self._address, self._bytes = machine, 0, np.empty(0, np.uint8)
        self._filled = WeakKeyDictionary()  # Buffer -> gaps [first, end) in it that hold zeros

    def read(self, parts):
        """[bytes of each part, uint8, when all that is on its stream has ended]; (stream, Buffer, offset, nbytes).

        Parts that follow each other closely in a Buffer, and in the list, are one copy, with the gap between them.
        """
        machine, copies, places, total = self._machine, [], [], 0
        machine.activate()
        machine.submit()
        for stream, buffer, offset, nbytes in parts:
            if copies and copies[-1][1] is buffer and 0 <= offset - copies[-1][3] < STEP:
                self._fill(stream, buffer, copies[-1][3], offset)
                total += offset - copies[-1][3]
                copies[-1][3] = offset + nbytes
            else:
                copies.append([stream, buffer, offset, offset + nbytes, total])
            places.append((total, total + nbytes))
            total += nbytes
        self._make_room(total)
        for stream, buffer, first, end, at in copies:
            check(
                cu.cuMemcpyDtoHAsync(
                    self._address + at, buffer.address + first, end - first, stream.handle
                )
            )
        for stream in dict.fromkeys([stream for stream, *_ in copies]):
            check(cu.cuStreamSynchronize(stream.handle))
        return [self._bytes[first:end].copy() for first, end in places]

    def _fill(self, stream, buffer, first, end):
        """Zeros, once, in bytes that nobody writes: else sanitizers see a copy of what was never written.

        On the stream, behind whatever was launched before: that may still read what somebody else had in this memory.
        """
        filled = self._filled.setdefault(buffer, set())
        if first < end and (first, end) not in filled:
            check(cu.cuMemsetD8Async(buffer.address + first, 0, end - first, stream.handle))
            filled.add((first, end))

    def _make_room(self, nbytes):
        if nbytes <= len(self._bytes):
            return
        self.free()
        nbytes = -(-nbytes // STEP) * STEP
        with outside_capture():
            self._address = int(check(cu.cuMemHostAlloc(nbytes, 0)))
        self._bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self._address), np.uint8)

    def free(self):
        """Give the memory back; read() takes new memory."""
        if self._address:
            self._machine.activate()
            address, self._address, self._bytes = self._address, 0, np.empty(0, np.uint8)
            check(cu.cuMemFreeHost(address))
