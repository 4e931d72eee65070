"""Memory that results are lent from: a heap in the pool that peers write, an arena of this rank's own memory."""

from heapq import heappop, heappush

from collections import deque

from epmoe import device
from epmoe.lending import ALIGNMENT, Loan, arrange


class _Piece:
    """What a Loan needs to know of where its memory came from: fields at their offsets, and the way back."""

    def __init__(self, machine, fields, give_back):
        self.machine, self.fields, self.take_back = machine, fields, give_back


def _lend(machine, buffer, fields, offset, nbytes, give_back):
    if device.SIM:
        buffer.fill(0xA5, offset, nbytes)   # what a kernel fails to write must not look like the last result
    fields = {name: f._replace(offset=f.offset + offset) for name, f in fields.items()}
    return Loan(_Piece(machine, fields, lambda _: give_back()), buffer)


class Heap:
    """Part of one rank's buffer, [first, end) in bytes; lends the first free piece that is large enough."""

    def __init__(self, machine, buffer, first, end):
        self.machine, self.buffer = machine, buffer
        self._free = [(first, end)] if end > first else []
        self._returned = deque()    # pieces come back at any moment, in any thread (torch's of backward): only appended

    def lend(self, shapes):
        """A Loan of arrays {name: (shape, dtype)}, or None if no free piece holds them."""
        fields, nbytes = arrange(shapes)
        while self._returned:
            self._put_back(*self._returned.popleft())
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i:i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return _lend(self.machine, self.buffer, fields, start, nbytes,
                             lambda: self._returned.append((start, start + nbytes)))
        return None

    def _put_back(self, start, end):
        pieces = sorted([*self._free, (start, end)])
        self._free = pieces[:1]
        for start, end in pieces[1:]:
            if self._free[-1][1] == start:
                self._free[-1] = (self._free[-1][0], end)
            else:
                self._free.append((start, end))


def size_class(nbytes):
    """The smallest size of an arena's buffers that holds nbytes: at most an eighth larger."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Arena:
    """One rank's own memory for results, handles and scratch: buffers by size class, used again when nobody looks."""

    def __init__(self, machine, rank):
        self.machine, self.rank = machine, rank
        self._free, self._closed, self.allocated_bytes = {}, False, 0

    def lend(self, name, shapes):
        """A Loan of arrays {name: (shape, dtype)}."""
        fields, nbytes = arrange(shapes)
        size = size_class(nbytes)
        waiting = self._free.setdefault(size, [])
        if waiting:
            _, buffer = heappop(waiting)        # the lowest address: equal calls in turn get equal memory
        else:
            regions = [(f"{name}.{field}", f.offset, f.shape, f.dtype, ()) for field, f in fields.items()]
            buffer = self.machine.alloc(size, name, self.rank, regions=regions)
            self.allocated_bytes += size
        return _lend(self.machine, buffer, fields, 0, nbytes, lambda: self._put_back(size, buffer))

    def _put_back(self, size, buffer):
        if self._closed:
            buffer.free()
        else:
            heappush(self._free[size], (buffer.address, buffer))

    def close(self):
        """Free what is not lent; what is lent follows when its last array is gone."""
        self._closed = True
        for buffers in self._free.values():
            while buffers:
                buffers.pop()[1].free()
