"""Moves and clears runs of bytes with one warp, for every decoder and for the encoders' padding."""

from epmoe.device import (device_fn, i32, lane_id, load16, load16_nc, load_u8, load_u32, store16, store_u8, store_u32,
                          u32, u64)

from ..bits import divided
from ..params import LANES, by_lanes, in_turn, tuple_of

MAX_IN_FLIGHT = 8       # loads of a lane before its first store, so that a row waits for memory once or a few times


@device_fn
def store_vector(address, q):
    """Store the 16 bytes that a 16-byte load gave as q (4 words)."""
    store16(address, q[0], q[1], q[2], q[3])


def most_parts(n_bytes: int) -> int:
    """How many warps can share a copy of n_bytes with work for all lanes of each."""
    return max(1, -(-(n_bytes // 16) // LANES))


def copy_part(n_bytes: int, *, read_only=False):
    """Device function (dst, src, part, n_parts, lane): a warp copies its part of n_bytes, a multiple of 16.

    Parts 0..n_parts-1 are contiguous and cover everything. Both addresses are 16-byte aligned. It uses ordinary loads,
    which see what a peer wrote before the signal that this warp acquired. read_only: it uses the read-only path, which
    may not see that, for arrays that are not written while the kernel runs.
    """
    load, bounds = load16_nc if read_only else load16, part_bounds(n_bytes)
    (ask_8, put_8), (ask_4, put_4) = _halves(8, load, store_vector, 16), _halves(4, load, store_vector, 16)

    @device_fn
    def copy(dst, src, part, n_parts, lane):
        first, end = bounds(part, n_parts)
        while first + 4 * LANES < end:
            put_8(ask_8(src, i32(first + lane), end), dst, u64(16), i32(first + lane), end)
            first = i32(first + 8 * LANES)
        if first < end:
            put_4(ask_4(src, i32(first + lane), end), dst, u64(16), i32(first + lane), end)

    return copy


def part_bounds(n_bytes: int):
    """Device function (part, n_parts) -> (first, end): the 16-byte vectors of a part of n_bytes."""
    n_vectors, n_runs = n_bytes // 16, most_parts(n_bytes)

    @device_fn
    def bounds(part, n_parts):
        runs = divided(i32(n_runs + n_parts - 1), n_parts)
        first = i32(part * runs * LANES)
        return first, i32(min(first + runs * LANES, n_vectors))

    return bounds


def copy_in_halves(held, load, store=store_vector, *, short=False):
    """(ask, put): a warp copies 16-byte vectors in two halves, between which it can do other things.

    ask(src, first, end) -> vectors first + lane, first + lane + 32, ..., `held` in a lane; does not wait for the loads.
    put(dst, src, first, end, vectors) stores those below `end`, and copies the rest. load(address) -> vector.
    store(address, vector). short: if a part has only one vector in each lane, as is common, only this one is loaded.
    """
    ask_all, put_all = _halves(held, load, store, 16)
    (ask_one, _), (ask_others, _) = _halves(1, load, store, 16), _halves(held - 1, load, store, 16)
    nothing = no_vectors(held - 1)

    @device_fn
    def ask(src, first, end):
        i = i32(first + lane_id())
        if not short:
            return ask_all(src, i, end)
        one, others = ask_one(src, i, end), nothing()
        if first + LANES < end:
            others = ask_others(src, i32(i + LANES), end)
        return one + others

    @device_fn
    def put(dst, src, first, end, vectors):
        put_all(vectors, dst, u64(16), i32(first + lane_id()), end)
        first = i32(first + held * LANES)
        while first < end:
            put_all(ask(src, first, end), dst, u64(16), i32(first + lane_id()), end)
            first = i32(first + held * LANES)

    return ask, put


no_vector = device_fn(lambda: (u32(0), u32(0), u32(0), u32(0)))


def no_vectors(n: int):
    """Device function () -> n vectors of zeros."""
    return tuple_of(n, lambda j: no_vector)


def _halves(n, load, store, item_bytes):
    """(ask, put) for item i, and the n - 1 items that follow at distances of 32.

    ask(src, i, end) -> items, without waiting for the loads. put(items, dst, stride, i, end) stores those below `end`,
    each to dst + stride * its number. load(address) -> item, store(address, item).
    """
    def loading(j):
        # Past the end the last item is read again and not stored: no branch comes between the loads.
        return device_fn(lambda src, i, end: load(
            src + u64(item_bytes) * u64(min(i32(i + j * LANES), i32(end - 1)))))

    def storing(j):
        @device_fn
        def store_one(items, dst, stride, i, end):
            at = i32(i + j * LANES)
            if at < end:
                store(dst + stride * u64(at), items[j])
            return items

        return store_one

    return tuple_of(n, loading), in_turn(n, lambda j: storing(n - 1 - j))       # this order needs the fewest registers


def spread(item_bytes: int, n_items: int):
    """Device function (dst, stride, src, lane): item i of n_items adjacent ones goes to dst + stride * i.

    Items are bytes, or aligned words of 4 bytes. A lane takes every 32nd, in batches of about the same size.
    """
    load, store = {1: (load_u8, store_u8), 4: (load_u32, store_u32)}[item_bytes]
    per_lane = -(-n_items // LANES)
    batch = -(-per_lane // -(-per_lane // MAX_IN_FLIGHT))
    ask, put = _halves(batch, load, store, item_bytes)

    @device_fn
    def spread_all(dst, stride, src, lane):
        start = 0
        while start < n_items:
            i = i32(start + lane)
            put(ask(src, i, n_items), dst, stride, i, n_items)
            start = i32(start + LANES * batch)

    return spread_all


def clear_padding(n_bytes: int):
    """Device function (dst, lane): one warp writes n_bytes zero bytes whose end is 16-byte aligned."""
    if n_bytes == 0:
        return device_fn(lambda dst, lane: None)
    clears = {16: lambda at: store16(at, 0, 0, 0, 0), 4: lambda at: store_u32(at, 0), 1: lambda at: store_u8(at, 0)}
    unit = next(unit for unit in clears if n_bytes % unit == 0)
    store = device_fn(clears[unit])
    clear = by_lanes(lambda i, dst: store(dst + u64(unit * i)))
    return device_fn(lambda dst, lane: clear(n_bytes // unit, dst))
