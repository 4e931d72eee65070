"""Shared memory: arrays of a block, and intrinsics that take shared-window addresses."""

import math
import sys

import numpy as np
from greenlet import getcurrent

from .memory import VIEW, WIDTH, out_of_bounds
from .ops import MASK32, SCOPES, WRAP, intrinsic, read4, step, write4
from .scheduler import NOW
from .threads import SHARED_WINDOW

int32, uint32, uint64, float32, uint8 = (np.dtype(n) for n in "int32 uint32 uint64 float32 uint8".split())
VIEWS = {int32: "i32", uint32: "u32", uint64: "u64", float32: "f32", uint8: "u8"}


class SharedArray:
    """A static array in shared memory, as kernels index it."""

    __slots__ = ("span", "window", "shape", "size", "view", "item", "wrap", "name")

    def __init__(self, span, window, shape, dtype):
        self.span, self.window, self.shape = span, window, shape
        self.size = math.prod(shape)
        self.item = dtype.itemsize
        self.view = span.views[VIEW[VIEWS[dtype]]]
        self.wrap = WRAP[VIEWS[dtype]]

    def _place(self, index, write, name):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        shape = self.shape
        if len(shape) == 1:
            k = index
            inside = 0 <= k < shape[0]
        else:
            k, inside = 0, len(index) == len(shape)
            for i, n in zip(index, shape):
                k = k * n + i
                inside = inside and 0 <= i < n
        if not inside:
            raise out_of_bounds(
                "index %s" % (index,), getcurrent().place(), "%s has shape %s" % (self.span.name, shape)
            )
        if NOW.detector is not None:
            NOW.detector.plain(
                getcurrent().actor, self.span.low + k * self.item, self.item, write, name, sys._getframe(2), self.span
            )
        return k

    def __getitem__(self, index):
        return self.view[self._place(index, False, "shared array []")]

    def __setitem__(self, index, v):
        k = self._place(index, True, "shared array []=")
        self.view[k] = self.wrap(v)


@intrinsic
def shared_array(shape, dtype):
    """A static array of the block. shape (int or tuple) is a constant, dtype int32, uint32, uint64, float32 or uint8.

    For GPUs the shape must be a literal or a name, not an expression such as 2 * STAGES. Every call site has its own
    array, and all threads of the block share it.
    """
    block = getcurrent().block
    frame = sys._getframe(1)
    site = (id(frame.f_code), frame.f_lasti)  # code objects take long to hash
    array = block.shared.get(site)
    if array is None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        window = (block.shared_top + 127) & ~127
        block.shared_top = window + nbytes
        name = "shared array of %s:%d" % (frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno)
        span = block.new_span(nbytes, name, window, [(name, 0, shape, dtype, ())])
        array = block.shared[site] = SharedArray(span, window, shape, dtype)
    return array


@intrinsic
def shared_addr(array):
    """Shared-window address (u32) of an array's first element."""
    return array.window


@intrinsic
def dynamic_shared():
    """Shared-window address (u32) of the launch's dynamic shared memory, 16-byte aligned."""
    return SHARED_WINDOW


@intrinsic
def shared_add_i32(array, i, v):
    """Add to an element of a shared int32 array, relaxed, scope cta. Returns the old value.

    Adding 0 is a poll, and polls are spins, as for strong loads.
    """
    t = step()
    if not 0 <= i < array.size:
        raise out_of_bounds(
            "shared_add_i32 at index %d" % i, t.place(), "%s has %d elements" % (array.span.name, array.size)
        )
    old = array.view[i]
    new = array.wrap(old + v)
    address = array.span.low + 4 * i
    if NOW.detector is not None:
        NOW.detector.strong(
            t.actor,
            address,
            4,
            True,
            True,
            SCOPES["cta"],
            False,
            False,
            "shared_add_i32",
            sys._getframe(1),
            array.span,
            old,
            new,
        )
    array.view[i] = new
    if new != old:
        if address >> 4 in NOW.watchers:
            NOW.written(address >> 4)
    elif v == 0:
        NOW.poll(t, address, old, old)
    return old


def shared_span(t, window_address, nbytes, name, alignment=None):
    """(real address, span) of bytes at a shared-window address of thread t's block. An error names the line."""
    window_address &= MASK32
    found = t.block.locate(window_address, nbytes)
    misaligned = window_address % (alignment or nbytes)
    if found is None or misaligned:
        pieces = ", ".join("%d to %d: %s" % (w, w + s.high - s.low, s.name) for w, s in t.block.spans)
        why = (
            "is not %d-byte aligned" % (alignment or nbytes)
            if misaligned
            else "lies in no piece, or the bytes pass its end"
        )
        raise out_of_bounds(
            "%s (%d bytes)" % (name, nbytes),
            t.place(),
            "shared address %d %s (%s)" % (window_address, why, pieces or "launch with shared_bytes=... to have some"),
        )
    return found


def _shared_load(ty):
    name, n, view = "shared_load_" + ty, WIDTH[ty], VIEW[ty]

    def load(address):
        t = step()
        real, span = shared_span(t, address, n, name)
        if NOW.detector is not None:
            NOW.detector.plain(t.actor, real, n, False, name, sys._getframe(1), span)
        return span.views[view][(real - span.origin) // n]

    return intrinsic(load, name, "The %s at a shared-window address." % ty)


def _shared_store(ty):
    name, n, view, wrap = "shared_store_" + ty, WIDTH[ty], VIEW[ty], WRAP[ty]

    def store(address, v):
        t = step()
        real, span = shared_span(t, address, n, name)
        if NOW.detector is not None:
            NOW.detector.plain(t.actor, real, n, True, name, sys._getframe(1), span)
        span.views[view][(real - span.origin) // n] = wrap(v)

    return intrinsic(store, name, "Store a %s at a shared-window address." % ty)


for _ty in ("i32", "u32", "u64", "f32"):
    _shared_load(_ty)
    _shared_store(_ty)


@intrinsic
def shared_load16(address):
    """Four u32 from a 16-byte aligned shared-window address."""
    t = step()
    real, span = shared_span(t, address, 16, "shared_load16")
    if NOW.detector is not None:
        NOW.detector.plain(t.actor, real, 16, False, "shared_load16", sys._getframe(1), span)
    return read4(span.views[0], real - span.origin)


@intrinsic
def shared_store16(address, a, b, c, d):
    """Store four u32 at a 16-byte aligned shared-window address."""
    t = step()
    real, span = shared_span(t, address, 16, "shared_store16")
    if NOW.detector is not None:
        NOW.detector.plain(t.actor, real, 16, True, "shared_store16", sys._getframe(1), span)
    write4(span.views[0], real - span.origin, a & MASK32, b & MASK32, c & MASK32, d & MASK32)
