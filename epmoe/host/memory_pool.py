"""Memory for results. A call borrows it, and it is free again when nothing refers to its Loan any more."""

from array import array
from functools import partial
from operator import attrgetter
from weakref import finalize, ref

import numpy as np

from epmoe.device import SIM
from epmoe.host.arrays import DeviceArray, Field
from epmoe.host.dlpack import Memory

ALIGNMENT = 256  # bytes
# The simulator fills what is lent with this byte. As int32 it is positive: a word that nobody wrote is no -1, "none".
UNWRITTEN = 0x5A
_new = object.__new__


def align(nbytes):
    """nbytes rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def arrange(shapes):
    """Lay arrays, {name: (shape, dtype)}, one after another, each 256-byte aligned: ({name: Field}, total bytes)."""
    offset, placed = 0, {}
    for name, (shape, dtype) in shapes.items():
        placed[name] = field = Field(shape, dtype, offset)
        offset += align(max(field.nbytes, 1))
    return placed, max(offset, ALIGNMENT)


def size_class(n, least=ALIGNMENT):
    """The smallest size that holds n bytes (rows), at most an eighth larger; sizes are multiples of `least`."""
    step = max(least, 1 << max(0, n.bit_length() - 4))
    return -(-n // step) * step


class Arrangement:
    """Arrays, {name: (shape, dtype)}, that are lent together. fields: {name: Field}.

    size: bytes of a buffer made for it. With is_exact it is nbytes, else a size class, so that other arrangements fit
    too. words: {name: index} of the launch words that hold the arrays' addresses.
    """

    __slots__ = ("name", "fields", "nbytes", "size", "words")

    def __init__(self, name, shapes, is_exact=False, words=None):
        self.name, self.words = name, words or {}
        self.fields, self.nbytes = arrange(shapes)
        self.size = self.nbytes if is_exact else size_class(self.nbytes)

    def runs(self, base):
        """Addresses of the arrays, laid out from `base`: [(slice of a launch's words, array of addresses)]."""
        made, end = [], None
        for i, name in sorted((i, name) for name, i in self.words.items()):
            if i != end:
                made.append((i, array("Q")))
            made[-1][1].append(base + self.fields[name].offset)
            end = i + 1
        return [(slice(i, i + len(run)), run) for i, run in made]


class Piece:
    """Memory that is lent as a whole: nbytes of a buffer from byte `start` on, at the address `base`.

    arrangement: the last one lent. words: its addresses, from Arrangement.runs(). loan: a weak reference to the Loan.
    back: that reference's callback.
    """

    __slots__ = "pool buffer start nbytes base arrangement words loan back".split()

    def __init__(self, pool, buffer, start, nbytes, free):
        self.pool, self.buffer, self.start, self.nbytes = pool, buffer, start, nbytes
        self.base, self.arrangement, self.loan = buffer.address + start, None, None
        # one step, in any thread and without a line of Python: free[self] = the weak reference
        self.back = partial(free.__setitem__, self)

    def arrange(self, arrangement):
        """Lay out a new arrangement. In a part that peers write, words hold offsets instead of addresses."""
        self.arrangement, at = arrangement, self.start if self.pool.is_part else self.base
        self.words = arrangement.runs(at)


class Loan:
    """A Piece in use. Every array made from it keeps the Loan alive; when the Loan is gone, the piece is free."""

    __slots__ = ("piece", "base", "guard", "__weakref__")

    buffer = property(attrgetter("piece.buffer"), doc="The buffer that it is part of.")
    start = property(attrgetter("piece.start"), doc="Its first byte in the buffer.")
    nbytes = property(attrgetter("piece.nbytes"), doc="Bytes that are lent.")
    fields = property(attrgetter("piece.arrangement.fields"), doc="{name: Field}.")
    ordinal = property(attrgetter("piece.pool.machine.ordinal"), doc="Number of the GPU.")

    def address(self, name):
        """Address of one of the arrays."""
        return self.base + self.fields[name].offset

    def holds(self, array):
        """Whether an Array starts in this memory and is C-contiguous."""
        return array.strides is None and 0 <= array.address - self.base < self.nbytes

    def array(self, name, n=None):
        """One of the arrays, or its first n entries: a NumPy view in the simulator, a DeviceArray on a GPU; or None."""
        field = self.fields.get(name)
        if field is None:
            return None
        return self.part(field if n is None else field.first(n))

    def part(self, field):
        """The array that a Field describes."""
        if not SIM:
            return DeviceArray(self, field)
        nbytes = field.nbytes if field.strides is None else field.span
        raw = self.buffer.array(np.uint8, (nbytes,), self.start + field.offset)
        memory = Memory.from_address(raw.ctypes.data)
        memory.owner = self, raw  # raw too: a dry buffer allocates it here
        return np.ndarray(field.shape, field.dtype, memory, 0, field.strides)


def results_of(fields, machine):
    """A function (Loan, n=None) that returns an array for each Field; n: only the first n rows."""
    whole = list(fields)

    def of(loan, n=None):
        fields = whole if n is None else [field.first(n) for field in whole]
        if SIM:
            return [loan.part(field) for field in fields]
        made = []
        for field in fields:
            array = _new(DeviceArray)  # loan.part(field), in half of the time
            array._owner, array._field = loan, field
            made.append(array)
        return made

    return of


class MemoryPool:
    """Lends memory of one rank. Returned pieces are kept by size and lent again.

    part: (buffer, first, end), bytes of a buffer that peers write, from which everything is lent. None: buffers are
    allocated as needed.
    """

    def __init__(self, machine, rank=0, part=None):
        self.machine, self.rank, self.is_part = machine, rank, part is not None
        self.buffer, self._first, self._end = part or (None, 0, 0)
        self._pieces, self._free = set(), {}  # size -> {Piece: a dead weak reference}
        self.bytes_by_name = {}  # of all buffers made, lent or not

    def lend(self, arrangement):
        """A Loan of an Arrangement; None if there is no room in the part."""
        size = arrangement.nbytes if self.is_part else arrangement.size
        free = self._free.get(size)
        if free:
            piece, _ = free.popitem()
        else:
            piece = self._new_piece(arrangement, size)
            if piece is None:
                return None
        if piece.arrangement is not arrangement:
            piece.arrange(arrangement)
        loan = Loan()
        loan.piece, loan.base = piece, piece.base
        piece.loan = ref(loan, piece.back)
        if SIM:  # bytes that a kernel fails to write must not look like the last result
            piece.buffer.fill(UNWRITTEN, piece.start, piece.nbytes)
        return loan

    def _new_piece(self, a, size):
        buffer, start = self.buffer, 0
        if self.is_part:
            start = self._gap(size)
            if start is None:
                self._drop_free()
                start = self._gap(size)
            if start is None:
                return None
        else:
            regions = [(f"{a.name}.{name}", f.offset, f.shape, f.dtype, ()) for name, f in a.fields.items()]
            buffer = self.machine.alloc(size, a.name, self.rank, regions=regions)
            self.bytes_by_name[a.name] = self.bytes_by_name.get(a.name, 0) + size
        piece = Piece(self, buffer, start, size, self._free.setdefault(size, {}))
        self._pieces.add(piece)
        return piece

    def _gap(self, nbytes):
        """Start of the first nbytes of the part that are in no piece; None if there is no such gap."""
        start = self._first
        for piece in sorted(self._pieces, key=attrgetter("start")):
            if piece.start - start >= nbytes:
                return start
            start = piece.start + piece.nbytes
        return start if self._end - start >= nbytes else None

    def _drop_free(self):
        """Make gaps of the returned pieces."""
        for free in self._free.values():
            while free:
                piece, _ = free.popitem()
                self._pieces.discard(piece)

    @property
    def lent_bytes(self):
        """Bytes of the pieces in use."""
        free = sum(size * len(pieces) for size, pieces in self._free.items())
        return sum(piece.nbytes for piece in self._pieces) - free

    def when_unused(self, action):
        """Call action() when all loans have ended, which may be now. Do not lend or close after this."""
        _when_back(self._pieces, action)

    def close(self):
        """Free the buffers that are not lent; a lent one is freed when its last array is gone."""
        while self._pieces:
            piece = self._pieces.pop()
            _when_back([piece], piece.buffer.free)
        self._free.clear()


class _Guard:
    """Kept alive by every Loan of some pieces."""


def _when_back(pieces, action):
    """Call action() when no Loan of these pieces is left, which may be now. Loans may end in any thread."""
    loans = [loan for piece in pieces if piece.loan and (loan := piece.loan())]
    if not loans:
        action()
        return
    guard = _Guard()
    finalize(guard, action).atexit = False
    for loan in loans:
        loan.guard, loan.piece.loan = guard, None
