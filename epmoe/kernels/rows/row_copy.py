"""Copies a row, or a part of it, to several places: a warp reads 16 bytes a lane and stores them to each place."""

from epmoe.device import device_fn, ffs, i32, load16, load16_nc, store16, u32, u64, warp_broadcast_u64

VECTOR = 16         # bytes
BATCH = 128         # vectors: four loads by each of 32 lanes
FEWEST_PARTS = 7    # of a row that is sent, if it has so many batches, so that all warps end at about the same time


@device_fn
def rotated(mask, start):
    """The mask with bit `start` moved to bit 0; each peer begins with another one, so they do not all meet at one."""
    return u32((mask >> u32(start)) | u32(mask << u32((32 - start) & 31)))


def copy_to_lanes(*, read_only, store=store16):
    """Device functions (load_batch, store_batch, copy).

    copy(src, place, mask, start, first, end, lane): vectors [first, end) of the row at src go to the place (address of
    a row) of each lane in `mask`, beginning with lane `start`. The row is read once. load_batch(src, base, end, lane),
    store_batch(batch, place, mask, start, base, end, lane): its two halves, for [base, base + BATCH) before `end`.
    read_only: the row is not written while the kernel runs, so that the non-coherent path may be used. store: the
    device function that stores 16 bytes.
    """
    load = load16_nc if read_only else load16

    @device_fn
    def store_all(to, a, b, c, d, n):
        """The lane's first n vectors of a batch."""
        if n > 0:
            store(to, a[0], a[1], a[2], a[3])
        if n > 1:
            store(to + u64(512), b[0], b[1], b[2], b[3])
        if n > 2:
            store(to + u64(1024), c[0], c[1], c[2], c[3])
        if n > 3:
            store(to + u64(1536), d[0], d[1], d[2], d[3])

    @device_fn
    def load_batch(src, base, end, lane):
        # lanes behind the end read the last vector again and store nothing: all stay together for the broadcasts
        one, last = i32(base + lane), i32(end - 1)
        return (load(src + u64(VECTOR) * u64(min(one, last))), load(src + u64(VECTOR) * u64(min(i32(one + 32), last))),
                load(src + u64(VECTOR) * u64(min(i32(one + 64), last))),
                load(src + u64(VECTOR) * u64(min(i32(one + 96), last))))

    @device_fn
    def store_batch(batch, place, mask, start, base, end, lane):
        n, at = i32((end - base - lane + 31) >> 5), u64(VECTOR) * u64(base + lane)
        left = rotated(mask, start)
        while left != u32(0):
            to = u64(warp_broadcast_u64(place, i32((ffs(left) - 1 + start) & 31))) + at
            store_all(to, batch[0], batch[1], batch[2], batch[3], n)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def copy(src, place, mask, start, first, end, lane):
        base = i32(first)
        while base < end:
            store_batch(load_batch(src, base, end, lane), place, mask, start, base, end, lane)
            base = i32(base + BATCH)

    return load_batch, store_batch, copy


def fewest_parts(n_vectors):
    """The fewest parts into which warps divide a row of this many vectors."""
    return min(FEWEST_PARTS, max(1, -(-n_vectors // BATCH)))


def parts(n_vectors):
    """Device functions that share a row among warps where there are more warps than rows.

    count(n_rows, warps) -> parts of a row. span(part, n_parts) -> its vectors [first, end).
    """
    most, batches = max(1, -(-n_vectors // 32)), -(-n_vectors // BATCH)

    @device_fn
    def count(n_rows, warps):
        return i32(max(1, min(most, i32(u32(max(warps, 0)) // u32(max(n_rows, 1))))))

    @device_fn
    def span(part, n_parts):
        runs, a_run = i32(most), i32(1)
        if n_parts <= batches:                  # whole batches
            runs, a_run = i32(batches), i32(BATCH // 32)
        runs = i32(i32(u32(i32(runs + n_parts - 1)) // u32(n_parts)) * a_run)
        first = i32(min(i32(part * runs * 32), n_vectors))
        return first, i32(min(i32(first + runs * 32), n_vectors))

    return count, span
