"""Plain loads and stores, of one number or of 16 bytes, and prefetches."""

import sys
from bisect import bisect_right

from greenlet import getcurrent

from .memory import VIEW, WIDTH
from .ops import MASK32, MASK64, SPANS, STARTS, WRAP, intrinsic, read4, span_of, step, write4
from .scheduler import NOW


def _load(ty):
    name, n, view = "load_" + ty, WIDTH[ty], VIEW[ty]
    shift = n.bit_length() - 1
    low_bits = n - 1

    def load(address):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & low_bits:
            address &= MASK64
            span = span_of(address, n, name)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, n, False, name, sys._getframe(1), span)
        return span.views[view][address - span.origin >> shift]

    return intrinsic(load, name, "The %s at a global address; a plain load." % ty)


def _store(ty):
    name, n, view, wrap = "store_" + ty, WIDTH[ty], VIEW[ty], WRAP[ty]
    shift = n.bit_length() - 1
    low_bits = n - 1

    def store(address, v):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & low_bits or span.readonly:
            address &= MASK64
            span = span_of(address, n, name, write=True)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, n, True, name, sys._getframe(1), span)
        try:
            span.views[view][address - span.origin >> shift] = v
        except (ValueError, TypeError):  # the value does not fit as it is
            span.views[view][address - span.origin >> shift] = wrap(v)
        if address >> 4 in NOW.watchers:
            NOW.written(address >> 4)

    return intrinsic(store, name, "Store a %s at a global address; a plain store." % ty)


def _load16(name, doc):
    nc = name == "load16_nc"

    def load16(address):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + 16 > span.high or address & 15:
            address &= MASK64
            span = span_of(address, 16, name)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, 16, False, name, sys._getframe(1), span, nc)
        return read4(span.views[0], address - span.origin)

    return intrinsic(load16, name, doc)


def _store16(name, doc):
    def store16(address, a, b, c, d):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + 16 > span.high or address & 15 or span.readonly:
            address &= MASK64
            span = span_of(address, 16, name, write=True)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, 16, True, name, sys._getframe(1), span)
        write4(span.views[0], address - span.origin, a & MASK32, b & MASK32, c & MASK32, d & MASK32)
        if address >> 4 in NOW.watchers:
            NOW.written(address >> 4)

    return intrinsic(store16, name, doc)


for _ty in WIDTH:
    _load(_ty)
    _store(_ty)
_load16("load16", "Four u32 from a 16-byte aligned global address; a plain load.")
_load16("load16_nc", "load16 through the non-coherent path: only for bytes that nobody writes while the kernel runs.")
_load16("load16_stream", "load16 that leaves no trace in the L1 cache.")
_store16("store16", "Store four u32 at a 16-byte aligned global address; a plain store.")
_store16("store16_stream", "store16 that leaves no trace in the L1 cache.")


@intrinsic
def prefetch(address):
    """Prefetch the bytes around a global address into L2. Nothing is read, so no order is needed."""
    step()
    span_of(address & MASK64, 1, "prefetch")
