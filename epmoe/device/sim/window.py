"""Memory that several processes map: this rank's part as a Buffer, a peer's part as addresses for writing."""

from .machine import Buffer
from .memory import MEMORY, POISON, Span


class WindowBuffer(Buffer):
    """This rank's part of a shared window. data: its bytes, uint8 [n]."""

    def __init__(self, machine, data, name, rank, regions):
        self.machine, self.nbytes, self.name, self.rank = machine, len(data), name, rank
        self._data, self.address = data, data.ctypes.data
        self._data[:] = POISON
        self._span = add_window(data, name, rank, regions)


def add_window(data, name, rank, regions):
    """Let kernels of this process touch a rank's part of a shared window. Returns the Span, for remove_window."""
    where = data.ctypes.data, len(data), name, rank
    return MEMORY.add(Span(*where, regions=regions, keep=data, shared=True))


def remove_window(span):
    """Kernels must not touch it any more."""
    MEMORY.remove(span)
