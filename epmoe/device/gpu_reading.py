"""Reading small parts of Buffers behind the launches that write them: copies on their stream, and one wait for all."""

import ctypes

import numpy as np

from .gpu_driver import check, cu, outside_capture

STEP = 4096             # bytes


class Reading:
    """Copies into memory of the host that is pinned, so that the GPU writes it without the host's help."""

    def __init__(self, machine):
        self._machine, self._address, self._bytes = machine, 0, np.empty(0, np.uint8)

    def read(self, parts):
        """[bytes of each part, uint8, when all that is on its stream has ended]; (stream, Buffer, offset, nbytes)."""
        machine, ends = self._machine, np.cumsum([nbytes for *_, nbytes in parts]).tolist()
        machine.activate()
        machine.submit()
        self._make_room(ends[-1])
        for (stream, buffer, offset, nbytes), end in zip(parts, ends):
            check(cu.cuMemcpyDtoHAsync(self._address + end - nbytes, buffer.address + offset, nbytes, stream.handle))
        for stream in dict.fromkeys([stream for stream, *_ in parts]):
            check(cu.cuStreamSynchronize(stream.handle))
        return [self._bytes[end - nbytes:end].copy() for (*_, nbytes), end in zip(parts, ends)]

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
