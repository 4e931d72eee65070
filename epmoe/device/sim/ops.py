"""Memory words: plain, strong and atomic accesses, fences, ids and clocks.

Every one of them is a step of the scheduler (it may switch threads), is checked for bounds and alignment, and is shown
to the race detector when there is one. They are made by a few factories, since they differ in width, order and scope.
"""
import struct
import sys
from bisect import bisect_right

import numpy as np
from greenlet import getcurrent

from .. import arithmetic, names
from .memory import MEMORY, VIEW, WIDTH, out_of_bounds
from .scheduler import NOW

MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
SCOPES = {"cta": 1, "gpu": 2, "sys": 3}
STARTS, SPANS = MEMORY.starts, MEMORY.spans
read4, write4 = struct.Struct("=4I").unpack_from, struct.Struct("=4I").pack_into
OPS = {}


def word(op, name=None, doc=None):
    """Enter an operation into the table, under its name."""
    op.__name__ = op.__qualname__ = name or op.__name__
    if doc:
        op.__doc__ = doc
    OPS[op.__name__] = op
    return op


def _to_i32(v):
    return (int(v) + 0x80000000 & MASK32) - 0x80000000


def _to_u32(v):
    return int(v) & MASK32


def _to_u64(v):
    return int(v) & MASK64


def _to_u16(v):
    return int(v) & 0xFFFF


def _to_u8(v):
    return int(v) & 0xFF


WRAP = {"u8": _to_u8, "u16": _to_u16, "i32": _to_i32, "u32": _to_u32, "u64": _to_u64, "f32": np.float32}


def span_of(address, nbytes, name, alignment=None, write=False):
    """The span that holds these bytes; raises with the line of the kernel, the buffer and the index if none does."""
    complaint = MEMORY.complaint(address, nbytes, alignment or nbytes)
    span = MEMORY.find(address, nbytes)
    if complaint is None and write and span.readonly:
        complaint = "%s is read-only" % span.describe(address)
    if complaint is None:
        return span
    raise out_of_bounds("%s (%d bytes)" % (name, nbytes), getcurrent().place(), complaint)


# ---------------------------------------------------------------- plain
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
            span = span_of(address, n, name)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, n, False, name, sys._getframe(1), span)
        return span.views[view][address - span.origin >> shift]
    return word(load, name, "The %s at a global address; a plain load." % ty)


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
            span = span_of(address, n, name, write=True)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, n, True, name, sys._getframe(1), span)
        try:
            span.views[view][address - span.origin >> shift] = v
        except (ValueError, TypeError):             # it does not fit as it is
            span.views[view][address - span.origin >> shift] = wrap(v)
        if address >> 4 in NOW.watchers:
            NOW.written(address >> 4)
    return word(store, name, "Store a %s at a global address; a plain store." % ty)


def _load16(name, doc):
    nc = name == "load16_nc"

    def load16(address):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + 16 > span.high or address & 15:
            span = span_of(address, 16, name)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, 16, False, name, sys._getframe(1), span, nc)
        return read4(span.views[0], address - span.origin)
    return word(load16, name, doc)


def _store16(name, doc):
    def store16(address, a, b, c, d):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + 16 > span.high or address & 15 or span.readonly:
            span = span_of(address, 16, name, write=True)
        if NOW.detector is not None:
            NOW.detector.plain(getcurrent().actor, address, 16, True, name, sys._getframe(1), span)
        write4(span.views[0], address - span.origin, a & MASK32, b & MASK32, c & MASK32, d & MASK32)
        if address >> 4 in NOW.watchers:
            NOW.written(address >> 4)
    return word(store16, name, doc)


for _ty in WIDTH:
    _load(_ty)
    _store(_ty)
_load16("load16", "Four u32 from a 16-byte aligned global address; a plain load.")
_load16("load16_nc", "load16 through the non-coherent path: only for what nobody writes while the kernel runs.")
_load16("load16_stream", "load16 that leaves no trace in the L1 cache.")
_store16("store16", "Store four u32 at a 16-byte aligned global address; a plain store.")
_store16("store16_stream", "store16 that leaves no trace in the L1 cache.")


@word
def prefetch(address):
    """Bring the bytes around a global address nearer; nothing is read, so no order is needed."""
    NOW.fuel -= 1
    if NOW.fuel < 0:
        NOW.preempt()
    span_of(address, 1, "prefetch")


# ---------------------------------------------------------------- strong loads and stores
def _strong_load(order, scope, ty):
    name, n, view, number = "ld_%s_%s_%s" % (order, scope, ty), WIDTH[ty], VIEW[ty], SCOPES[scope]
    shift, acquire = n.bit_length() - 1, order == "acquire"

    def ld(address):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & (n - 1):
            span = span_of(address, n, name)
        t = getcurrent()
        value = newest = span.strong[view][address - span.origin >> shift]
        if NOW.detector is not None:
            value = NOW.detector.strong(t.actor, address, n, True, False, number, acquire, False, name,
                                        sys._getframe(1), span, newest, None)
        # a second look at an unchanged word, with nothing but such looks between: wait until something changes; an
        # acquiring look behind a relaxed one, which has ended a wait, is none
        time = t.operations + NOW.mark - NOW.fuel
        polled = t.polled
        if polled and time - t.poll_time > 1:
            polled.clear()
        t.poll_time = time
        look = address | acquire
        if look in polled and polled[look] == value == newest:
            NOW.spin(t)
            t.poll_time = t.operations
        else:
            polled[look] = value
        return value
    return word(ld, name, "%s load of a %s, scope %s." % (order.capitalize(), ty, scope))


def _strong_store(order, scope, ty):
    name, n, view, wrap, number = "st_%s_%s_%s" % (order, scope, ty), WIDTH[ty], VIEW[ty], WRAP[ty], SCOPES[scope]
    shift, release = n.bit_length() - 1, order == "release"

    def st(address, v):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & (n - 1) or span.readonly:
            span = span_of(address, n, name, write=True)
        v = wrap(v)
        view_, k = span.strong[view], address - span.origin >> shift
        if NOW.detector is not None:
            NOW.detector.strong(getcurrent().actor, address, n, False, True, number, False, release, name,
                                sys._getframe(1), span, view_[k], v)
        view_[k] = v
        if address >> 4 in NOW.watchers:
            NOW.written(address >> 4)
    return word(st, name, "%s store of a %s, scope %s." % (order.capitalize(), ty, scope))


# ---------------------------------------------------------------- read-modify-write
def _rmw(name, order, scope, ty, change, returns=True, operands=1, doc=None):
    n, view, wrap, number = WIDTH[ty], VIEW[ty], WRAP[ty], SCOPES[scope]
    shift, acquire, release = n.bit_length() - 1, order in ("acquire", "acq_rel"), order in ("release", "acq_rel")

    def access(address, *v):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & (n - 1) or span.readonly:
            span = span_of(address, n, name, write=True)
        view_, k = span.strong[view], address - span.origin >> shift
        if span.shared:
            old, new = view_.update(k, lambda old: wrap(change(old, *v)))
        else:
            old = view_[k]
            new = wrap(change(old, *v))
        if NOW.detector is not None:
            NOW.detector.strong(getcurrent().actor, address, n, True, True, number, acquire, release, name,
                                sys._getframe(2), span, old, new)
        if not span.shared:
            view_[k] = new
        if new != old and address >> 4 in NOW.watchers:
            NOW.written(address >> 4)
        return old

    if operands == 2:
        def rmw(address, expected, new):
            return access(address, wrap(expected), wrap(new))
    elif returns:
        def rmw(address, v):
            return access(address, wrap(v))
    else:
        def rmw(address, v):
            access(address, wrap(v))
    return word(rmw, name, doc)


def _add(old, v):
    return old + v


def _or(old, v):
    return old | v


def _cas(old, expected, new):
    return new if old == expected else old


for _ty in ("i32", "u32", "u64"):
    for _scope in SCOPES:
        for _order in ("relaxed", "acquire"):
            _strong_load(_order, _scope, _ty)
        for _order in ("relaxed", "release"):
            _strong_store(_order, _scope, _ty)
            _rmw("red_add_%s_%s_%s" % (_order, _scope, _ty), _order, _scope, _ty, _add, returns=False,
                 doc="Add to a %s, %s, scope %s; the old value is not returned." % (_ty, _order, _scope))
        for _order in ("relaxed", "acquire", "release", "acq_rel"):
            _rmw("atomic_add_%s_%s_%s" % (_order, _scope, _ty), _order, _scope, _ty, _add,
                 doc="Add to a %s, %s, scope %s; returns the old value." % (_ty, _order, _scope))
for _scope in ("gpu", "sys"):
    for _ty in ("i32", "u32", "u64"):
        _rmw("atomic_max_relaxed_%s_%s" % (_scope, _ty), "relaxed", _scope, _ty, max,
             doc="Raise a %s to at least v, relaxed, scope %s; returns the old value." % (_ty, _scope))
    _rmw("atomic_or_relaxed_%s_u32" % _scope, "relaxed", _scope, "u32", _or,
         doc="Set bits of a u32, relaxed, scope %s; returns the old value." % _scope)
    for _order in ("relaxed", "acq_rel"):
        for _ty in ("i32", "u64"):
            _rmw("atomic_cas_%s_%s_%s" % (_order, _scope, _ty), _order, _scope, _ty, _cas, operands=2,
                 doc="Replace a %s by new if it is as expected, %s, scope %s; returns the old value."
                 % (_ty, _order, _scope))


def _fence(scope):
    name, number = "fence_acq_rel_" + scope, SCOPES[scope]

    def fence():
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        if NOW.detector is not None:
            NOW.detector.fence(getcurrent().actor, number)
    return word(fence, name, "fence.acq_rel, scope %s: orders this thread's accesses before it and after it." % scope)


for _scope in SCOPES:
    _fence(_scope)


# ---------------------------------------------------------------- ids and clocks
@word
def thread_idx():
    """Index of the thread in its block."""
    return getcurrent().tid


@word
def block_idx():
    """Index of the block in the grid."""
    return getcurrent().block.index


@word
def block_dim():
    """Threads a block."""
    return getcurrent().launch.threads


@word
def grid_dim():
    """Blocks in the grid."""
    return getcurrent().launch.grid


@word
def lane_id():
    """Index of the thread in its warp, 0..31."""
    return getcurrent().lane


@word
def warp_id():
    """Index of the warp in its block."""
    return getcurrent().tid >> 5


@word
def n_warps():
    """Warps a block."""
    return (getcurrent().launch.threads + 31) >> 5


def _tick(ns):
    """A step that is no operation of its own: it costs time, and does not interrupt a spin."""
    NOW.extra_ns += ns
    NOW.fuel -= 1
    NOW.mark -= 1
    if NOW.fuel < 0:
        NOW.preempt()


@word
def globaltimer():
    """Nanoseconds since some start; here 100 for each operation done by anybody."""
    _tick(0)
    return NOW.nanoseconds()


@word
def clock():
    """Cycles of this multiprocessor since some start; here the same as globaltimer."""
    _tick(0)
    return NOW.nanoseconds()


@word
def nanosleep(ns):
    """Sleep for about so many nanoseconds."""
    _tick(int(ns))


for _name in " ".join([names.CASTS, names.NUMBERS, names.BITS]).split():
    word(getattr(arithmetic, _name))
