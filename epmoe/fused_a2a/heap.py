"""Memory that results are lent from: a heap in the pool that peers write, an arena of this rank's own memory."""

import sys
from threading import RLock

from epmoe import device
from epmoe.device.captures import is_seen_captured
from epmoe.host.arrays import lent_again
from epmoe.host.elsewhere import Place
from epmoe.host.lending import ALIGNMENT, Loan, arrange

_one_thread = RLock()  # results go in any thread; an action may let others go


class _Piece:
    """What a Loan needs to know of where its memory came from: fields at their offsets, and the way back.

    start, nbytes: where in its buffer the memory begins, and its size. in_heap: whether it is a part of a Heap.
    """

    def __init__(self, machine, fields, take_back, nbytes, start=0, in_heap=False):
        self.machine, self.fields, self.take_back, self.start = machine, fields, take_back, start
        self.nbytes, self.in_heap = nbytes, in_heap
        self.arrays = {}  # (address of the buffer, names) -> arrays of it that nobody has been lent


def place_of(loan):
    """Where a loan's memory begins."""
    return loan.buffer.address + loan._pool.start


def is_in_heap(loan):
    """Whether a loan's memory is a part of a Heap."""
    return loan._pool.in_heap


def places_in(loan):
    """Places of a loan for Elsewhere: launches know memory of a Heap by its offset in the pool, too."""
    piece = loan._pool
    place = Place(place_of(loan), piece.nbytes)
    return (place, Place(piece.start, piece.nbytes)) if piece.in_heap else (place,)


def places_of_fields(loan):
    """The same of each of its arrays, where loans of one form have their arrays at different offsets."""
    fields, start = loan.fields.values(), loan.buffer.address
    places = [Place(start + f.offset, f.nbytes) for f in fields]
    return places + [Place(f.offset, f.nbytes) for f in fields] if loan._pool.in_heap else places


def arrays_in(loan, names):
    """[loan.array(name)] in less time, where the same memory had such arrays before. names: a tuple."""
    if device.SIM:
        return [loan.array(name) for name in names]
    arrays, key = loan._pool.arrays, (loan.buffer.address, names)
    known = arrays.get(key)
    if known is None:
        known = arrays[key] = lent_again([loan.array(name) for name in names], None, None)
    return loan.again(known)


def _lend(piece, buffer, start, nbytes, captured):
    """captured: a list that keeps the Loan if a graph writes to it at every replay, whoever looks at it by then."""
    if device.SIM:
        buffer.fill(
            0xA5, start, nbytes
        )  # what a kernel fails to write must not look like the last result
    loan = Loan(piece, buffer)
    if is_seen_captured(piece.machine):
        captured.append(loan)
    return loan


class Staged:
    """Stands for a Loan where a result is in the staging area, and moved later; the class lends such as a memory does.

    No word of a launch follows from where it is, so its place is 0.
    """

    address = start = nbytes = 0
    in_heap = False

    @classmethod
    def lend(cls):
        """Another one."""
        return cls()

    @property
    def buffer(self):
        """Of which the address is asked for, as of a Loan's."""
        return self

    _pool = buffer


class Heap:
    """Part of one rank's buffer, [first, end) in bytes; lends the first free piece that is large enough."""

    def __init__(self, machine, buffer, first, end):
        self.machine, self.buffer = machine, buffer
        self._free = [(first, end)] if end > first else []
        self.captured, self._size = [], end - first
        self._unused = None  # what is to be done when nothing is lent any more
        self._returned = []  # pieces come back at any moment, in any thread (torch's of backward): only appended

    def memory(self, shapes, otherwise=None):
        """HeapMemory for arrays {name: (shape, dtype)}, which lends them as often as one likes.

        otherwise: ArenaMemory, or Staged, where they may be if there is no room.
        """
        return HeapMemory(self, shapes, otherwise)

    def lend(self, shapes):
        """A Loan of arrays {name: (shape, dtype)}, or None if no free piece holds them."""
        return self.memory(shapes).lend()

    def take(self, nbytes):
        """Where so many free bytes begin, which are free no more; None if there are none together."""
        while self._returned:
            start, end = self._returned.pop()
            if end - start == nbytes:  # what such a result just had
                return start
            self._put_back(start, end)
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start, end):
        """These bytes are free again."""
        self._returned.append((start, end))
        if self._unused is not None:
            self._act_if_unused()

    def when_unused(self, action):
        """Nothing is lent any more. Call action() when all that was lent has come back, which may be now."""
        self.captured.clear()
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


class HeapMemory:
    """Arrays of one kind, to be lent by a Heap."""

    def __init__(self, heap, shapes, otherwise=None):
        self._heap, self._pieces, self._otherwise = (
            heap,
            {},
            otherwise,
        )  # pieces by where they begin
        self._fields, self._nbytes = arrange(shapes)

    def lend(self):
        """A Loan, or None if there is no room."""
        heap, start, nbytes = self._heap, self._heap.take(self._nbytes), self._nbytes
        if start is None:
            return None
        piece = self._pieces.get(start)
        if piece is None:
            fields = {name: f._replace(offset=f.offset + start) for name, f in self._fields.items()}
            piece = self._pieces[start] = _Piece(
                heap.machine,
                fields,
                lambda _: heap.give_back(start, start + nbytes),
                nbytes,
                start,
                True,
            )
        return _lend(piece, heap.buffer, start, nbytes, heap.captured)

    def lend_anywhere(self):
        """A Loan, from elsewhere if there is no room; None if that may not be."""
        loan = self.lend()
        return self._otherwise.lend() if loan is None and self._otherwise is not None else loan


def size_class(nbytes):
    """The smallest size of an arena's buffers that holds nbytes: at most an eighth larger."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Arena:
    """One rank's own memory for results, handles and scratch: buffers by size class, used again when nobody looks."""

    def __init__(self, machine, rank):
        self.machine, self.rank = machine, rank
        self._free, self._closed, self.allocated_bytes, self.captured = {}, False, 0, []

    def memory(self, name, shapes):
        """ArenaMemory for arrays {name: (shape, dtype)}, which lends them as often as one likes."""
        return ArenaMemory(self, name, shapes)

    def lend(self, name, shapes):
        """A Loan of arrays {name: (shape, dtype)}."""
        return self.memory(name, shapes).lend()

    def take(self, name, fields, size):
        """A buffer of a size class."""
        waiting = self._free.get(size)
        if waiting:
            return waiting.pop()  # what such a result just had
        self._free.setdefault(size, [])
        regions = [
            (f"{name}.{field}", f.offset, f.shape, f.dtype, ()) for field, f in fields.items()
        ]
        self.allocated_bytes += size
        return self.machine.alloc(size, name, self.rank, regions=regions)

    def give_back(self, size, buffer):
        """Nobody looks at the buffer any more."""
        if not self._closed:
            self._free[size].append(buffer)
        elif not sys.is_finalizing():
            buffer.free()

    @property
    def lent_bytes(self):
        """Bytes of the buffers that somebody looks at."""
        return self.allocated_bytes - sum(
            size * len(waiting) for size, waiting in self._free.items()
        )

    def close(self):
        """Free what is not lent; what is lent follows when its last array is gone."""
        self._closed = True
        self.captured.clear()
        for buffers in self._free.values():
            while buffers:
                buffers.pop().free()


class ArenaMemory:
    """Arrays of one kind, to be lent by an Arena."""

    def __init__(self, arena, name, shapes):
        self._arena, self._name = arena, name
        fields, self._nbytes = arrange(shapes)
        self._size = size = size_class(self._nbytes)
        self._piece = _Piece(
            arena.machine, fields, lambda buffer: arena.give_back(size, buffer), size
        )

    def lend(self):
        """A Loan."""
        arena = self._arena
        buffer = arena.take(self._name, self._piece.fields, self._size)
        return _lend(self._piece, buffer, 0, self._nbytes, arena.captured)

    lend_anywhere = lend
