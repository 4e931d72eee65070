"""Moves and clears runs of bytes with one warp, for every decoder and for the encoders' padding."""

from epmoe.device import (device_fn, i32, load16, load16_nc, load_u8, load_u32, store16, store_u8, store_u32, u64)

from ..division import divided

LANES = 32
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

    The parts 0..n_parts-1 are contiguous and together everything; both addresses are 16-byte aligned. By ordinary
    loads, which see what a peer wrote before the signal that this warp acquired; read_only: through the read-only path,
    which may not, for arrays that are not written while the kernel runs.
    """
    n_vectors, n_runs, load = n_bytes // 16, most_parts(n_bytes), load16
    if read_only:
        load = load16_nc
    eight, four = _batch_until_end(load, 8), _batch_until_end(load, 4)

    @device_fn
    def copy(dst, src, part, n_parts, lane):
        runs = divided(i32(n_runs + n_parts - 1), n_parts)
        first = i32(part * runs * LANES)
        end = i32(min(first + runs * LANES, n_vectors))
        while first + 4 * LANES < end:
            eight(dst, src, i32(first + lane), end)
            first = i32(first + 8 * LANES)
        if first < end:
            four(dst, src, i32(first + lane), end)

    return copy


def _batch_until_end(load, n):
    """Device function (dst, src, i, end): vector i, and the n - 1 that follow at distances of 32, below `end`."""
    if n == 0:
        return _nothing_until_end
    others = _batch_until_end(load, n - 1)

    @device_fn
    def move(dst, src, i, end):
        # Past the end the last vector is read again and not stored: no branch comes between the loads.
        value = load(src + u64(16) * u64(min(i, i32(end - 1))))
        others(dst, src, i32(i + LANES), end)
        if i < end:
            store_vector(dst + u64(16) * u64(i), value)

    return move


@device_fn
def _nothing_until_end(dst, src, i, end):
    return


def spread_words(n_words: int):
    """Device function (dst, stride, src, lane): word i of n_words adjacent ones goes to dst + stride * i."""
    return spread_items(load_u32, store_u32, n_words, 4)


def copy_bytes(n_bytes: int):
    """Device function (dst, src, lane): one warp copies n_bytes that need not be aligned."""
    return _contiguous(spread_items(load_u8, store_u8, n_bytes, 1), 1)


def _contiguous(spread, item_bytes):
    @device_fn
    def copy(dst, src, lane):
        spread(dst, u64(item_bytes), src, lane)

    return copy


def spread_items(load, store, n_items: int, item_bytes: int):
    """Device function (dst, stride, src, lane): item i of n_items adjacent ones goes to dst + stride * i.

    load(address) -> value, store(address, value). A lane takes every 32nd item, a batch of them at a time: all loads of
    the batch come before its stores.
    """
    per_lane = -(-n_items // LANES)
    n_batches = -(-per_lane // MAX_IN_FLIGHT)
    batch = -(-per_lane // n_batches)
    exact = n_items == LANES * batch * n_batches

    def first(n):
        """Device function (dst, stride, src, i): item i, and the n - 1 that follow it at a distance of 32."""
        if n == 0:
            return _nothing
        others = first(n - 1)

        @device_fn
        def move_exactly(dst, stride, src, i):
            value = load(src + u64(item_bytes) * u64(i))
            others(dst, stride, src, i32(i + LANES))
            store(dst + stride * u64(i), value)

        @device_fn
        def move_if_there(dst, stride, src, i):
            # Past the end the last item is read again and not stored: no branch comes between the loads.
            value = load(src + u64(item_bytes) * u64(min(i, n_items - 1)))
            others(dst, stride, src, i32(i + LANES))
            if i < n_items:
                store(dst + stride * u64(i), value)

        return move_exactly if exact else move_if_there

    move_batch = first(batch)

    @device_fn
    def spread(dst, stride, src, lane):
        start = 0
        while start < n_items:
            move_batch(dst, stride, src, i32(start + lane))
            start = i32(start + LANES * batch)

    return spread


@device_fn
def _nothing(dst, stride, src, i):
    return


def clear_padding(n_bytes: int):
    """Device function (dst, lane): one warp writes n_bytes zero bytes that end where a 16-byte vector does."""
    if n_bytes == 0:
        return _clear_nothing
    stores = (_clear_vector, 16), (_clear_word, 4), (_clear_byte, 1)
    store, unit = next((store, unit) for store, unit in stores if n_bytes % unit == 0)
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


@device_fn
def _clear_nothing(dst, lane):
    return


@device_fn
def _clear_vector(address):
    store16(address, 0, 0, 0, 0)


@device_fn
def _clear_word(address):
    store_u32(address, 0)


@device_fn
def _clear_byte(address):
    store_u8(address, 0)
