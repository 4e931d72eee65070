"""Memory that several processes map: this rank's part as a Buffer, a peer's part as addresses for writing."""

import ctypes

import numpy as np

from .machine import Buffer
from .memory import MEMORY, POISON, Span


class WindowBuffer(Buffer):
    """This rank's part of a shared window. `keep` owns the memory at this address."""

    def __init__(self, machine, address, nbytes, name, rank, regions, keep):
        self.machine, self.nbytes, self.name, self.rank = machine, int(nbytes), name, rank
        self._data = np.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(address), np.uint8)
        self._data[:] = POISON
        self.address = address
        self._span = add_window(address, self.nbytes, name, rank, regions, keep)


def add_window(address, nbytes, name, rank, regions, keep):
    """Let kernels of this process touch a rank's part of a shared window. Returns the Span, for remove_window."""
    return MEMORY.add(Span(address, nbytes, name, rank, regions=regions, keep=keep, shared=True))


def remove_window(span):
    """Kernels must not touch it any more."""
    MEMORY.remove(span)
