"""Moves and clears runs of bytes with one warp, for every decoder and for the encoders' padding."""

from epmoe.device import (device_fn, i32, lane_id, load16, load16_nc, load_u8, load_u32, store16, store_u8, store_u32,
                          u32, u64)

from ..unrolled import tuple_of

LANES = 32
MAX_IN_FLIGHT = 8       # loads of a lane before its first store, so that a row waits for memory once or a few times


@device_fn
def divided(a, b):
    """a // b of int32 numbers, a not negative and b positive: of unsigned words, where // of int32 divides 64-bit ones."""
    return i32(u32(a) // u32(b))


@device_fn
def store_vector(address, q):
    """Store the 16 bytes that a 16-byte load gave as q (4 words)."""
    store16(address, q[0], q[1], q[2], q[3])


def most_parts(n_bytes: int) -> int:
    """How many warps can share a copy of n_bytes with work for all lanes of each."""
    return max(1, -(-(n_bytes // 16) // LANES))


def copy_part(n_bytes: int, *, read_only=False):
    """Device function (dst, src, part, n_parts, lane): a warp copies its part of n_bytes, a multiple of 16.

    The parts 0..n_parts-1 are contiguous and together everything; both addresses are 16-byte aligned. By ordinary
    loads, which see what a peer wrote before the signal that this warp acquired; read_only: through the read-only path,
    which may not, for arrays that are not written while the kernel runs.
    """
    load, bounds = load16_nc if read_only else load16, part_bounds(n_bytes)
    eight, four = _moving(load, store_vector, 16, 8), _moving(load, store_vector, 16, 4)

    @device_fn
    def copy(dst, src, part, n_parts, lane):
        first, end = bounds(part, n_parts)
        while first + 4 * LANES < end:
            eight(dst, u64(16), src, i32(first + lane), end)
            first = i32(first + 8 * LANES)
        if first < end:
            four(dst, u64(16), src, i32(first + lane), end)

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


def copy_in_halves(held, load, store=store16, *, short=False):
    """(ask, put): a warp copies 16-byte vectors in two halves, between which other things can be done.

    ask(src, first, end) -> vectors first + lane, first + lane + 32, ..., `held` of a lane, on their way. put(dst, src,
    first, end, vectors) stores those below `end`, and copies the rest. load(address) -> vector; store(address, *vector).
    short: parts are often of one vector a lane, and then only this one is loaded.
    """
    @device_fn
    def load_one(src, i, last):
        # Past the end the last vector is read again and not stored: no branch comes between the loads.
        return load(src + u64(16) * u64(min(i, last)))

    def loading(j):
        """Device function (src, i, last) -> vectors j to held - 1."""
        if j == held:
            return device_fn(lambda src, i, last: ())
        others = loading(j + 1)
        return device_fn(lambda src, i, last: (load_one(src, i32(i + j * LANES), last),) + others(src, i, last))

    def storing(j):
        """Device function (dst, i, end, vectors): stores vectors j to held - 1, below the end."""
        if j == held:
            return device_fn(lambda dst, i, end, vectors: None)
        others = storing(j + 1)

        @device_fn
        def store_some(dst, i, end, vectors):
            at, q = i32(i + j * LANES), vectors[j]
            if at < end:
                store(dst + u64(16) * u64(at), q[0], q[1], q[2], q[3])
            others(dst, i, end, vectors)

        return store_some

    load_all, load_others, store_held, nothing = loading(0), loading(1), storing(0), no_vectors(held - 1)

    @device_fn
    def ask(src, first, end):
        i, last = i32(first + lane_id()), i32(end - 1)
        if not short:
            return load_all(src, i, last)
        q, others = load_one(src, i, last), nothing()
        if first + LANES < end:
            others = load_others(src, i, last)
        return (q,) + others

    @device_fn
    def put(dst, src, first, end, vectors):
        store_held(dst, i32(first + lane_id()), end, vectors)
        first = i32(first + held * LANES)
        while first < end:
            store_held(dst, i32(first + lane_id()), end, ask(src, first, end))
            first = i32(first + held * LANES)

    return ask, put


def no_vectors(n: int):
    """Device function () -> n vectors of zeros."""
    return tuple_of(n, lambda j: _no_vector)


@device_fn
def _no_vector():
    return u32(0), u32(0), u32(0), u32(0)


def _moving(load, store, item_bytes, n):
    """Device function (dst, stride, src, i, end): item i, and the n - 1 that follow at distances of 32, below `end`.

    Each goes to dst + stride * its number. load(address) -> value, store(address, value): all loads come before the
    stores.
    """
    if n == 0:
        return device_fn(lambda dst, stride, src, i, end: None)
    others = _moving(load, store, item_bytes, n - 1)

    @device_fn
    def move(dst, stride, src, i, end):
        # Past the end the last item is read again and not stored: no branch comes between the loads.
        value = load(src + u64(item_bytes) * u64(min(i, i32(end - 1))))
        others(dst, stride, src, i32(i + LANES), end)
        if i < end:
            store(dst + stride * u64(i), value)

    return move


def spread_words(n_words: int):
    """Device function (dst, stride, src, lane): word i of n_words adjacent ones goes to dst + stride * i."""
    return _spreading(load_u32, store_u32, 4, n_words)


def copy_bytes(n_bytes: int):
    """Device function (dst, src, lane): one warp copies n_bytes that need not be aligned."""
    spread = _spreading(load_u8, store_u8, 1, n_bytes)
    return device_fn(lambda dst, src, lane: spread(dst, u64(1), src, lane))


def _spreading(load, store, item_bytes, n_items):
    """Device function (dst, stride, src, lane): all n_items, each lane every 32nd, in batches of about the same size."""
    per_lane = -(-n_items // LANES)
    n_batches = -(-per_lane // MAX_IN_FLIGHT)
    batch = -(-per_lane // n_batches)
    move_batch = _moving(load, store, item_bytes, batch)

    @device_fn
    def spread(dst, stride, src, lane):
        start = 0
        while start < n_items:
            move_batch(dst, stride, src, i32(start + lane), n_items)
            start = i32(start + LANES * batch)

    return spread


def clear_padding(n_bytes: int):
    """Device function (dst, lane): one warp writes n_bytes zero bytes that end where a 16-byte vector does."""
    if n_bytes == 0:
        return device_fn(lambda dst, lane: None)
    clears = {16: lambda at: store16(at, 0, 0, 0, 0), 4: lambda at: store_u32(at, 0), 1: lambda at: store_u8(at, 0)}
    unit = next(unit for unit in clears if n_bytes % unit == 0)
    store = device_fn(clears[unit])
    n_units = n_bytes // unit

    @device_fn
    def clear_once(dst, lane):
        if lane < n_units:
            store(dst + u64(unit * lane))

    @device_fn
    def clear(dst, lane):
        i = lane
        while i < n_units:
            store(dst + u64(unit * i))
            i = i32(i + LANES)

    return clear_once if n_units <= LANES else clear
