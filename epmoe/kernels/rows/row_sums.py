"""Sums of rows, vector by vector: a warp adds rows whose addresses its lanes hold, in float32, rounded once."""

from typing import NamedTuple

from epmoe.device import (ballot, device_fn, ffs, i32, load16, store16, syncwarp, u32, u64,
                          warp_broadcast_u64)

from .. import elements
from .row_copy import VECTOR

MOST = 32               # rows: one a lane
IN_FLIGHT = 4           # rows that are read together
AT_ONCE = 2             # vectors of up to four rows that a lane reads together


class RowSums(NamedTuple):
    """Device functions for one type of numbers.

    gather(places, kept, n, lane) -> (kept, n): the addresses that are not 0, by lane, behind the n <= MOST in `kept`;
    those past MOST are lost, and n tells. sum_rows(places, n, to, first, end, lane): the sum, from +0.0, of the vectors
    [first, end) of the rows in the first n lanes, in their order, stored in the row at `to`.
    """

    gather: callable
    sum_rows: callable


def make(dtype):
    """The functions for "bf16", "fp16" or "fp32"."""
    numbers = elements.make(dtype)
    zeros, add, pack = numbers.zeros, numbers.add, numbers.pack

    @device_fn
    def gather(places, kept, n, lane):
        syncwarp()                              # see "Lanes meet" in benchmarks/notes/rows.md
        left = u32(ballot(places != u64(0)))
        while left != u32(0):
            place = u64(warp_broadcast_u64(places, i32(ffs(left) - 1)))
            if lane == n:
                kept = place
            n, left = i32(n + 1), u32(left & u32(left - u32(1)))
        return kept, n

    @device_fn
    def add_up_to_four(sums, n, p, q, r, s):
        """Of four vectors the first n."""
        sums = add(sums, p)
        if n > 1:
            sums = add(sums, q)
        if n > 2:
            sums = add(sums, r)
        if n > 3:
            sums = add(sums, s)
        return sums

    @device_fn
    def store(to, vector, end, sums):
        q = pack(sums)
        if vector < end:
            store16(to + u64(VECTOR) * u64(vector), q[0], q[1], q[2], q[3])

    @device_fn
    def at_vector(vector, end):
        """Lanes behind the end take the last vector again, and store nothing: all stay together."""
        return u64(VECTOR) * u64(min(vector, i32(end - 1)))

    @device_fn
    def sum_two(a, b, n, to, first, end, lane):
        """Of one or two rows two vectors are in flight."""
        base = i32(first)
        while base < end:
            one, two = i32(base + lane), i32(base + lane + 32)
            p, q = load16(a + at_vector(one, end)), load16(b + at_vector(one, end))
            r, s = load16(a + at_vector(two, end)), load16(b + at_vector(two, end))
            store(to, one, end, add_up_to_four(zeros(), n, p, q, p, q))
            store(to, two, end, add_up_to_four(zeros(), n, r, s, r, s))
            base = i32(base + 64)

    @device_fn
    def sum_four(a, b, c, d, n, to, first, end, lane):
        base = i32(first)
        while AT_ONCE == 2 and base + 32 < end:     # eight loads in flight
            one, two = i32(base + lane), i32(base + lane + 32)
            at, more = at_vector(one, end), at_vector(two, end)
            p, q, r, s = load16(a + at), load16(b + at), load16(c + at), load16(d + at)
            t, u, v, w = load16(a + more), load16(b + more), load16(c + more), load16(d + more)
            store(to, one, end, add_up_to_four(zeros(), n, p, q, r, s))
            store(to, two, end, add_up_to_four(zeros(), n, t, u, v, w))
            base = i32(base + 64)
        while base < end:
            at = at_vector(i32(base + lane), end)
            p, q, r, s = load16(a + at), load16(b + at), load16(c + at), load16(d + at)
            store(to, i32(base + lane), end, add_up_to_four(zeros(), n, p, q, r, s))
            base = i32(base + 32)

    @device_fn
    def sum_many(places, n, to, first, end, lane):
        base = i32(first)
        while base < end:
            at, sums, i = at_vector(i32(base + lane), end), zeros(), i32(0)
            while i < n:
                last = i32(n - 1)
                p = load16(u64(warp_broadcast_u64(places, i)) + at)
                q = load16(u64(warp_broadcast_u64(places, i32(min(i32(i + 1), last)))) + at)
                r = load16(u64(warp_broadcast_u64(places, i32(min(i32(i + 2), last)))) + at)
                s = load16(u64(warp_broadcast_u64(places, i32(min(i32(i + 3), last)))) + at)
                sums = add_up_to_four(sums, i32(n - i), p, q, r, s)
                i = i32(i + IN_FLIGHT)
            store(to, i32(base + lane), end, sums)
            base = i32(base + 32)

    @device_fn
    def clear(to, first, end, lane):
        vector = i32(first + lane)
        while vector < end:
            store(to, vector, end, zeros())
            vector = i32(vector + 32)

    @device_fn
    def sum_rows(places, n, to, first, end, lane):
        last = i32(max(n, 1) - 1)               # where there are fewer, the last one is read again and not added
        a, b = u64(warp_broadcast_u64(places, i32(0))), u64(warp_broadcast_u64(places, i32(min(1, last))))
        c = u64(warp_broadcast_u64(places, i32(min(2, last))))
        d = u64(warp_broadcast_u64(places, i32(min(3, last))))
        if n == 0:
            clear(to, first, end, lane)
        elif n <= 2:
            sum_two(a, b, n, to, first, end, lane)
        elif n <= IN_FLIGHT:
            sum_four(a, b, c, d, n, to, first, end, lane)
        else:
            sum_many(places, n, to, first, end, lane)

    return RowSums(gather, sum_rows)
