"""The simulator's table of memory: the owner and name of every address.

Addresses are real, so arrays of the caller and windows shared between processes need no copy. Each access is looked up
here. An access outside every buffer, or a misaligned one, is an error that names the place.
"""

import ctypes
import os
from bisect import bisect_right
from collections import deque
from threading import RLock

import numpy as np

from epmoe_ref.errors import OutOfBoundsError

POISON = 0xA5
# held by the OS thread that runs kernels, or adds or removes memory: worlds in several threads
# take turns, one run at a time
ONE_AT_A_TIME = RLock()
if hasattr(os, "register_at_fork"):  # another thread may have held it when this process was forked
    os.register_at_fork(after_in_child=ONE_AT_A_TIME._at_fork_reinit)
VIEW = {"u8": 0, "u16": 1, "i32": 2, "u32": 3, "u64": 4, "f32": 5}  # index in Span.views
WIDTH = {"u8": 1, "u16": 2, "i32": 4, "u32": 4, "u64": 8, "f32": 4}


def aligned_bytes(nbytes, alignment=256):
    """uint8 array [nbytes] whose first byte lies on a multiple of `alignment`. It keeps the raw allocation alive."""
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class Span:
    """A range of bytes that kernels may touch, with views of every width for fast access by index.

    `low <= address < high`. The views start at `origin`, the next multiple of 16 at or below low, so that
    (address - origin) divided by a size is an index for every aligned address. Strong operations use `strong`. It holds
    the same views, except in memory that other processes also write (`shared`): there it holds the CPU's atomics.
    """

    __slots__ = "low high origin name rank readonly regions users keep host_accesses bytes views strong shared".split()

    def __init__(self, address, nbytes, name, rank, *, readonly=False, regions=None, keep=None, shared=False):
        self.low, self.high = address, address + nbytes
        self.name, self.rank, self.readonly = name, rank, readonly
        self.regions = sorted((Region(*r) for r in regions), key=lambda r: r.offset) if regions else []
        self.users, self.keep = 1, keep
        self.host_accesses = []  # the host's accesses while launches were in flight (race detector)
        self.origin = address & ~15
        length = max((self.high - self.origin + 15) & ~15, 16)
        memory = (ctypes.c_uint8 * length).from_address(self.origin) if address else bytearray(length)
        self.bytes = np.frombuffer(memory, np.uint8)
        view = memoryview(self.bytes)
        self.views = (view, *(view.cast(c) for c in "HiIQ"), self.bytes.view(np.float32))
        self.strong, self.shared = self.views, shared
        if shared:
            from .cpu_atomics import AtomicView

            self.strong = tuple(AtomicView(self.origin, t) if t in ("i32", "u32", "u64") else None for t in VIEW)

    def owner(self):
        return "" if self.rank is None else " of rank %d" % self.rank

    def describe(self, address):
        """The place in the layout's terms, such as "recv_count[local_expert 2, src_rank 1] of rank 0"."""
        offset = address - self.low
        index = bisect_right([r.offset for r in self.regions], offset) - 1
        if index >= 0:
            place = self.regions[index].describe(offset)
            if place:
                return place + self.owner()
        return "%s + %d bytes%s" % (self.name, offset, self.owner())


class Region:
    """A named part of a span: `shape` of `dtype` at byte `offset`. `indices` names the axes for reports."""

    __slots__ = ("name", "offset", "shape", "dtype", "indices", "nbytes")

    def __init__(self, name, offset, shape, dtype, indices=()):
        self.name, self.offset = name, int(offset)
        self.dtype, self.indices = np.dtype(dtype), tuple(indices)
        self.shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def describe(self, offset):
        """Name and index of the element at this byte offset of the span; None if it is past the region."""
        inside = offset - self.offset
        if inside >= self.nbytes:
            return None
        element, rest = divmod(inside, self.dtype.itemsize)
        index = [int(i) for i in np.unravel_index(element, self.shape)] if self.shape else []
        words = ["%s %d" % (self.indices[n], i) if n < len(self.indices) else str(i) for n, i in enumerate(index)]
        return "%s[%s]%s" % (self.name, ", ".join(words), " byte %d" % rest if rest else "")


CLOSE = 4096  # bytes


class Memory:
    """All spans of this process, by address. The first one is empty, so every address has a span before it."""

    def __init__(self):
        nothing = Span(0, 0, "nothing", None)
        nothing.low = nothing.high = -1 << 80
        self.starts, self.spans = [nothing.low], [nothing]
        self.freed = deque(maxlen=64)

    def add(self, span):
        if span.low == span.high:
            return span
        with ONE_AT_A_TIME:
            i = bisect_right(self.starts, span.low)
            self.starts.insert(i, span.low)
            self.spans.insert(i, span)
            used_again = [f for f in self.freed if f[0] < span.high and span.low < f[1]]
            for f in used_again:  # an access beside the new span is not an access to the freed one
                self.freed.remove(f)
        return span

    def remove(self, span):
        with ONE_AT_A_TIME:
            for i, s in enumerate(self.spans):
                if s is span:
                    del self.starts[i], self.spans[i]
                    self.freed.append((span.low, span.high, span.name + span.owner()))
                    return

    def find(self, address, nbytes=1):
        """The span that holds all these bytes, or None. (Spans may overlap: two views of one array of the caller.)"""
        for i in range(bisect_right(self.starts, address) - 1, 0, -1):
            if address + nbytes <= self.spans[i].high:
                return self.spans[i]
        return None

    def describe(self, address):
        span = self.find(address)
        return span.describe(address) if span else "address %#x" % address

    def complaint(self, address, alignment):
        """Why these bytes must not be touched: they are misaligned, or in no span."""
        if address % alignment:
            return "%s is not %d-byte aligned (address %#x)" % (self.describe(address), alignment, address)
        i, near = bisect_right(self.starts, address) - 1, []
        before = self.spans[i]
        if i >= 1:
            near.append(
                "%d bytes after the start of %s%s, which has %d bytes"
                % (address - before.low, before.name, before.owner(), before.high - before.low)
            )
        for low, high, name in self.freed:
            if low <= address < high:
                # or the access is beyond the end of an array that lies there now
                also = near if address - before.high < CLOSE else []
                return ", or ".join(["%s was freed (byte %d of it)" % (name, address - low), *also])
        if i + 1 < len(self.spans):
            s = self.spans[i + 1]
            near.append("%d bytes before %s%s" % (s.low - address, s.name, s.owner()))
        return "address %#x is outside every buffer: %s" % (address, " and ".join(near) or "there are none")


MEMORY = Memory()


def out_of_bounds(what, where, complaint):
    """The error for an access that is outside every buffer, or misaligned."""
    return OutOfBoundsError("%s of %s: %s" % (what, where, complaint))
