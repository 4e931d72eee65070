"""Memory for results, lent when a call needs it and back when nobody looks at the arrays any more.

An Arena lends memory of a rank's own, a buffer at a time; a Heap parts of one buffer, which peers write.
"""

import sys
from itertools import repeat
from threading import RLock

import numpy as np

from epmoe.device import SIM
from epmoe.host.arrays import DeviceArray, Field

ALIGNMENT = 256  # bytes
_one_thread = RLock()  # results go in any thread; an action may let others go


def arrange(shapes):
    """Lay arrays, {name: (shape, dtype)}, one after another, each 256-byte aligned: ({name: Field}, total bytes)."""
    offset, placed = 0, {}
    for name, (shape, dtype) in shapes.items():
        placed[name] = field = Field(shape, dtype, offset)
        offset += -(-max(field.nbytes, 1) // ALIGNMENT) * ALIGNMENT
    return placed, max(offset, ALIGNMENT)


def size_class(nbytes):
    """The smallest size of buffers that holds nbytes: at most an eighth larger."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Arrangement:
    """Arrays of one kind, {name: (shape, dtype)}, to be lent together. fields: {name: Field}.

    size: bytes of the buffer that an Arena lends for it: a size class, so that others fit in as well; exactly nbytes
    where is_exact.
    """

    __slots__ = ("name", "fields", "nbytes", "size")

    def __init__(self, name, shapes, is_exact=False):
        self.name = name
        self.fields, self.nbytes = arrange(shapes)
        self.size = self.nbytes if is_exact else size_class(self.nbytes)


class Loan:
    """Memory in use, from byte `start` of a buffer on; every array made from it keeps it alive, and then it is free."""

    __slots__ = ("buffer", "fields", "start", "base", "nbytes", "lender", "__weakref__")

    def __init__(self, lender, buffer, fields, start, nbytes):
        self.lender, self.buffer, self.fields = lender, buffer, fields
        self.start, self.nbytes, self.base = start, nbytes, buffer.address + start
        if SIM:  # what a kernel fails to write must not look like the last result
            buffer.fill(0xA5, start, nbytes)

    def __del__(self):
        self.lender.take_back(self.buffer, self.start, self.nbytes)

    def address(self, name):
        """Address of one of the arrays."""
        return self.base + self.fields[name].offset

    def holds(self, array):
        """Whether an Array lies in this memory, in C order."""
        return array.is_contiguous and 0 <= array.address - self.base < self.nbytes

    ordinal = property(lambda self: self.lender.machine.ordinal, doc="Number of the GPU.")

    def array(self, name, n=None):
        """One of the arrays, or its first n entries: a NumPy view in the simulator, a DeviceArray on a GPU; or None."""
        field = self.fields.get(name)
        if field is None:
            return None
        if n is not None:
            field = field.first(n)
        return self._numpy(field) if SIM else DeviceArray(self, field)

    def part(self, field):
        """The part of the memory that is a Field, as an array."""
        return self._numpy(field) if SIM else DeviceArray(self, field)

    def parts(self, fields):
        """[the part of the memory that is each Field, as an array]."""
        return list(map(self._numpy, fields) if SIM else map(DeviceArray, repeat(self), fields))

    def arrays(self, names):
        """These arrays, whole."""
        return self.parts([self.fields[name] for name in names])

    def read(self, name):
        """A copy of one of the arrays; waits for the kernels."""
        field = self.fields[name]
        return self.buffer.read(field.dtype, field.shape, self.start + field.offset)

    def read_bytes(self, offset, nbytes):
        """A copy of some bytes; waits for the kernels."""
        return self.buffer.read(np.uint8, (nbytes,), self.start + offset)

    def _numpy(self, field):
        raw = self.buffer.array(np.uint8, (max(field.nbytes, 1),), self.start + field.offset)
        of_loan = np.asarray(_LentMemory(self, raw))[: field.nbytes]
        return of_loan.view(field.dtype).reshape(field.shape)


class _LentMemory:
    """Carries a loan into NumPy: the base of every view, so the loan lives as long as any of them."""

    def __init__(self, loan, raw):
        self.loan, self.raw = loan, raw  # raw: a dry buffer makes an array of its own
        self.__array_interface__ = raw.__array_interface__


class Arena:
    """One rank's own memory: buffers by size, used again when nobody looks."""

    def __init__(self, machine, rank):
        self.machine, self.rank = machine, rank
        self._free, self._closed = {}, False
        self.bytes_by_name = {}  # of all buffers, lent or not

    def lend(self, arrangement):
        """A Loan of an Arrangement."""
        size = arrangement.size
        waiting = self._free.get(size)
        buffer = waiting.pop() if waiting else self._made(arrangement)
        return Loan(self, buffer, arrangement.fields, 0, size)

    def _made(self, a):
        regions = [
            (f"{a.name}.{name}", f.offset, f.shape, f.dtype, ()) for name, f in a.fields.items()
        ]
        self._free.setdefault(a.size, [])
        self.bytes_by_name[a.name] = self.bytes_by_name.get(a.name, 0) + a.size
        return self.machine.alloc(a.size, a.name, self.rank, regions=regions)

    def take_back(self, buffer, start, nbytes):
        """Nobody looks at the buffer any more."""
        if not self._closed:
            self._free[nbytes].append(buffer)
        elif not sys.is_finalizing():
            buffer.free()

    @property
    def allocated_bytes(self):
        """Bytes of all buffers, lent or not."""
        return sum(self.bytes_by_name.values())

    @property
    def lent_bytes(self):
        """Bytes of the buffers that somebody looks at."""
        waiting = sum(size * len(buffers) for size, buffers in self._free.items())
        return self.allocated_bytes - waiting

    def close(self):
        """Free what is not lent; what is lent follows when its last array is gone."""
        self._closed = True
        for buffers in self._free.values():
            while buffers:
                buffers.pop().free()


class Heap:
    """Part of one rank's buffer, [first, end) in bytes; lends the first free piece that is large enough."""

    def __init__(self, machine, buffer, first, end):
        self.machine, self.buffer = machine, buffer
        self._free = [(first, end)] if end > first else []
        self._size = end - first
        self._unused = None  # what is to be done when nothing is lent any more
        self._returned = []  # pieces come back at any moment, in any thread (torch's of backward): only appended

    def lend(self, arrangement):
        """A Loan of an Arrangement, or None if no free piece holds it."""
        fields, nbytes = arrangement.fields, arrangement.nbytes
        start = self._take(nbytes)
        return None if start is None else Loan(self, self.buffer, fields, start, nbytes)

    def _take(self, nbytes):
        """Where so many free bytes begin, which are free no more; None if there are none together."""
        returned = self._returned
        for i, (start, end) in enumerate(returned):
            if end - start == nbytes:  # what such a result had
                del returned[i]
                return start
        while True:
            for i, (start, end) in enumerate(self._free):
                if end - start >= nbytes:
                    self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return start
            if not returned:
                return None
            while returned:
                self._put_back(*returned.pop())

    def take_back(self, buffer, start, nbytes):
        """These bytes are free again."""
        self._returned.append((start, start + nbytes))
        if self._unused is not None:
            self._act_if_unused()

    def when_unused(self, action):
        """Nothing is lent any more. Call action() when all that was lent has come back, which may be now."""
        self._unused = action
        self._act_if_unused()

    @property
    def in_use(self):
        """Whether anything is lent."""
        while self._returned:
            self._put_back(*self._returned.pop())
        return sum(end - start for start, end in self._free) < self._size

    def _act_if_unused(self):
        with _one_thread:
            if self._unused is not None and not self.in_use and not sys.is_finalizing():
                action, self._unused = self._unused, None
                action()

    def _put_back(self, start, end):
        pieces = sorted([*self._free, (start, end)])
        self._free = pieces[:1]
        for start, end in pieces[1:]:
            if self._free[-1][1] == start:
                self._free[-1] = (self._free[-1][0], end)
            else:
                self._free.append((start, end))
