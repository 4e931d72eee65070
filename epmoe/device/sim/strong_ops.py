"""Intrinsics that synchronise: strong loads and stores, atomic read-modify-writes, fences."""

import sys
from bisect import bisect_right

from greenlet import getcurrent

from .memory import VIEW, WIDTH
from .ops import MASK64, SCOPES, SPANS, STARTS, WRAP, intrinsic, span_of, step
from .scheduler import NOW


def _strong_load(order, scope, ty, depth=1):
    """depth: how many frames up the kernel's line is."""
    name, n, view, number = "ld_%s_%s_%s" % (order, scope, ty), WIDTH[ty], VIEW[ty], SCOPES[scope]
    shift, acquire = n.bit_length() - 1, order == "acquire"

    def ld(address):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & (n - 1):
            address &= MASK64
            span = span_of(address, n, name)
        t = getcurrent()
        value = newest = span.strong[view][address - span.origin >> shift]
        if NOW.detector is not None:
            value = NOW.detector.strong(
                t.actor, address, n, True, False, number, acquire, False, name, sys._getframe(depth), span, newest, None
            )
        # A second load of an unchanged word, with only such loads in between, waits until something changes. An
        # acquiring load that follows a relaxed one does not count as a second load: it comes after a wait has ended.
        NOW.poll(t, address | acquire, value, newest)
        return value

    ld.__doc__ = "%s load of a %s, scope %s." % (order.capitalize(), ty, scope)
    return ld


def _strong_store(order, scope, ty, depth=1):
    """depth: as in _strong_load."""
    name, n = "st_%s_%s_%s" % (order, scope, ty), WIDTH[ty]
    view, wrap, number = VIEW[ty], WRAP[ty], SCOPES[scope]
    shift, release = n.bit_length() - 1, order == "release"

    def st(address, v):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & (n - 1) or span.readonly:
            address &= MASK64
            span = span_of(address, n, name, write=True)
        v = wrap(v)
        view_, k = span.strong[view], address - span.origin >> shift
        if NOW.detector is not None:
            NOW.detector.strong(
                getcurrent().actor,
                address,
                n,
                False,
                True,
                number,
                False,
                release,
                name,
                sys._getframe(depth),
                span,
                view_[k],
                v,
            )
        if address >> 4 not in NOW.watchers:
            view_[k] = v
        else:
            changed = view_[k] != v
            view_[k] = v
            NOW.written(address >> 4, changed)

    st.__doc__ = "%s store of a %s, scope %s." % (order.capitalize(), ty, scope)
    return st


def _four_words():
    """Relaxed loads and stores of 16 bytes at system scope. Each of the four words is accessed separately."""
    look = _strong_load("relaxed", "sys", "u32", depth=2)
    put = _strong_store("relaxed", "sys", "u32", depth=2)

    @intrinsic
    def load16_relaxed_sys(address):
        """Four u32 from a 16-byte aligned global address; relaxed loads, scope sys, one by one."""
        if address & 15:
            span_of(address & MASK64, 16, "load16_relaxed_sys")
        return look(address), look(address + 4), look(address + 8), look(address + 12)

    @intrinsic
    def store16_relaxed_sys(address, a, b, c, d):
        """Store four u32 at a 16-byte aligned global address; relaxed stores, scope sys, one by one."""
        if address & 15:
            span_of(address & MASK64, 16, "store16_relaxed_sys", write=True)
        put(address, a)
        put(address + 4, b)
        put(address + 8, c)
        put(address + 12, d)


def _rmw(name, order, scope, ty, change, returns=True, operands=1, doc=None):
    n, view, wrap, number = WIDTH[ty], VIEW[ty], WRAP[ty], SCOPES[scope]
    shift, acquire = n.bit_length() - 1, order in ("acquire", "acq_rel")
    release = order in ("release", "acq_rel")
    if not returns:
        acquire = None  # a reduction is not a read (PTX 8.4), so it forms no acquire pattern
    may_fail = operands == 2

    def access(address, *v):
        NOW.fuel -= 1
        if NOW.fuel < 0:
            NOW.preempt()
        span = SPANS[bisect_right(STARTS, address) - 1]
        if address + n > span.high or address & (n - 1) or span.readonly:
            address &= MASK64
            span = span_of(address, n, name, write=True)
        view_, k = span.strong[view], address - span.origin >> shift
        if span.shared:
            old, new = view_.update(k, lambda old: wrap(change(old, *v)))
        else:
            old = view_[k]
            new = wrap(change(old, *v))
        if NOW.detector is not None:
            # a failed comparison is a read, and releases nothing
            wrote = not may_fail or old == v[0]
            NOW.detector.strong(
                getcurrent().actor,
                address,
                n,
                True,
                wrote,
                number,
                acquire,
                release and wrote,
                name,
                sys._getframe(2),
                span,
                old,
                new,
            )
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

    return intrinsic(rmw, name, doc)


def _add(old, v):
    return old + v


def _or(old, v):
    return old | v


def _cas(old, expected, new):
    return new if old == expected else old


for _ty in ("i32", "u32", "u64"):
    for _scope in SCOPES:
        for _order in ("relaxed", "acquire"):
            intrinsic(_strong_load(_order, _scope, _ty), "ld_%s_%s_%s" % (_order, _scope, _ty))
        for _order in ("relaxed", "release"):
            intrinsic(_strong_store(_order, _scope, _ty), "st_%s_%s_%s" % (_order, _scope, _ty))
            _rmw(
                "red_add_%s_%s_%s" % (_order, _scope, _ty),
                _order,
                _scope,
                _ty,
                _add,
                returns=False,
                doc="Add to a %s, %s, scope %s; the old value is not returned." % (_ty, _order, _scope),
            )
        for _order in ("relaxed", "acquire", "release", "acq_rel"):
            _rmw(
                "atomic_add_%s_%s_%s" % (_order, _scope, _ty),
                _order,
                _scope,
                _ty,
                _add,
                doc="Add to a %s, %s, scope %s; returns the old value." % (_ty, _order, _scope),
            )
for _scope in ("gpu", "sys"):
    for _ty in ("i32", "u32", "u64"):
        _rmw(
            "atomic_max_relaxed_%s_%s" % (_scope, _ty),
            "relaxed",
            _scope,
            _ty,
            max,
            doc="Raise a %s to at least v, relaxed, scope %s; returns the old value." % (_ty, _scope),
        )
    _rmw(
        "atomic_or_relaxed_%s_u32" % _scope,
        "relaxed",
        _scope,
        "u32",
        _or,
        doc="Set bits of a u32, relaxed, scope %s; returns the old value." % _scope,
    )
    for _order in ("relaxed", "acq_rel"):
        for _ty in ("i32", "u64"):
            _rmw(
                "atomic_cas_%s_%s_%s" % (_order, _scope, _ty),
                _order,
                _scope,
                _ty,
                _cas,
                operands=2,
                doc="Replace a %s by new if it is as expected, %s, scope %s; returns the old value."
                % (_ty, _order, _scope),
            )


def _fence(scope):
    name, number = "fence_acq_rel_" + scope, SCOPES[scope]

    def fence():
        t = step()
        if NOW.detector is not None:
            NOW.detector.fence(t.actor, number)

    return intrinsic(
        fence, name, "fence.acq_rel, scope %s: orders this thread's accesses before it and after it." % scope
    )


for _scope in SCOPES:
    _fence(_scope)
_four_words()
