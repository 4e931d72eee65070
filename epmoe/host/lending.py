"""Memory for results: lent when a round needs it, back in the pool when nobody looks at the arrays any more."""

import sys
from math import prod
from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.host.arrays import DeviceArray, lent_again

ALIGNMENT = 256  # bytes


class Field(NamedTuple):
    """One array inside a loan: shape, dtype, and offset [bytes] from the loan's address."""

    shape: tuple
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self):
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


def arrange(shapes):
    """Lay arrays, {name: (shape, dtype)}, one after another, each 256-byte aligned: ({name: Field}, total bytes)."""
    offset, placed = 0, {}
    for name, (shape, dtype) in shapes.items():
        placed[name] = field = Field(tuple(int(n) for n in shape), np.dtype(dtype), offset)
        offset += -(-max(field.nbytes, 1) // ALIGNMENT) * ALIGNMENT
    return placed, max(offset, ALIGNMENT)


class Pool:
    """Buffers of one rank for one kind of result. As many exist as results of that kind are in use at once."""

    def __init__(self, machine, rank, name, shapes):
        self.machine, self.rank, self.name = machine, rank, name
        self.fields, self.nbytes = arrange(shapes)
        self._free, self._made = [], []
        self._closed = False

    def lend(self):
        """A Loan of a free buffer, or of a new one."""
        if self._free:
            buffer = self._free.pop()
        else:
            regions = [
                (f"{self.name}.{name}", f.offset, f.shape, f.dtype, ())
                for name, f in self.fields.items()
            ]
            buffer = self.machine.alloc(self.nbytes, self.name, self.rank, regions=regions)
            self._made.append(buffer)
        if device.SIM:
            buffer.fill(
                0xA5
            )  # what a kernel fails to write must not look like the last round's right answer
        return Loan(self, buffer)

    def take_back(self, buffer):
        """The last array in the buffer is gone."""
        if not self._closed:
            self._free.append(buffer)
        elif not sys.is_finalizing():
            buffer.free()

    def close(self):
        """Free what is not lent; what is lent follows when its last array is gone."""
        self._closed = True
        for buffer in self._free:
            buffer.free()
        self._free.clear()

    @property
    def allocated_bytes(self):
        """Bytes of all buffers, lent or not."""
        return self.nbytes * len(self._made)


class Loan:
    """A buffer of a pool in use; every array made from it keeps it alive, and after the last it is free again."""

    def __init__(self, pool, buffer):
        self.buffer, self.fields, self._pool = buffer, pool.fields, pool

    def __del__(self):
        self._pool.take_back(self.buffer)

    def address(self, name):
        """Address of one of the arrays."""
        return self.buffer.address + self.fields[name].offset

    def holds(self, array):
        """Whether an Array lies in this memory, in C order."""
        return array.is_contiguous and self.holds_address(array.address)

    def holds_address(self, address):
        """Whether an address lies in this memory."""
        return 0 <= address - self.buffer.address < self.buffer.nbytes

    def array(self, name, n=None):
        """One of the arrays, or its first n entries: a NumPy view in the simulator, a DeviceArray on a GPU."""
        field = self.fields[name]
        if device.SIM:
            return _lent_numpy(self, field)[:n]
        shape = field.shape if n is None else (n, *field.shape[1:])
        return DeviceArray(
            self.buffer.address + field.offset,
            shape,
            field.dtype,
            owner=self,
            read=self._read,
            ordinal=self._pool.machine.ordinal,
        )

    def again(self, arrays):
        """[DeviceArrays that an earlier loan of this buffer made, as this loan would make them]"""
        return lent_again(arrays, self, self._read)

    def _read(self, address, nbytes):
        return self.buffer.read(np.uint8, (nbytes,), offset=address - self.buffer.address)


class _LentMemory:
    """Carries a loan into NumPy: the base of every view, so the loan lives as long as any of them."""

    def __init__(self, loan, raw):
        self.loan, self.raw = loan, raw  # raw: a dry buffer makes an array of its own
        self.__array_interface__ = raw.__array_interface__


def _lent_numpy(loan, field):
    raw = loan.buffer.array(np.uint8, (max(field.nbytes, 1),), field.offset)
    return np.asarray(_LentMemory(loan, raw))[: field.nbytes].view(field.dtype).reshape(field.shape)
