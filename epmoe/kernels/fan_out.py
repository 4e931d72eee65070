"""One row to several places: a warp reads it once and stores it to every destination, 16 bytes a lane."""

from epmoe.device import device_fn, i32, load16, load16_nc, store16, u64, warp_broadcast_u64

BATCH = 128     # vectors of four loads by 32 lanes


def copy_to_places(n_bytes, n_places, *, read_only):
    """Device function (src, place, lane): the row at src goes to the place of each of the lanes 0..n_places-1.

    place: the lane's destination address, 0 for none; n_bytes is a multiple of 16. The row is read once. read_only: the
    row is an input that nobody writes while the kernel runs, so that the non-coherent path may be taken.
    """
    load = load16_nc if read_only else load16
    n_vectors = n_bytes // 16

    @device_fn
    def copy(src, place, lane):
        base = i32(0)
        while base + BATCH <= n_vectors:
            at = u64(16) * u64(base + lane)
            a = load(src + at)
            b = load(src + at + u64(512))
            c = load(src + at + u64(1024))
            d = load(src + at + u64(1536))
            k = i32(0)
            while k < n_places:
                to = u64(warp_broadcast_u64(place, k))
                if to != u64(0):
                    store16(to + at, a[0], a[1], a[2], a[3])
                    store16(to + at + u64(512), b[0], b[1], b[2], b[3])
                    store16(to + at + u64(1024), c[0], c[1], c[2], c[3])
                    store16(to + at + u64(1536), d[0], d[1], d[2], d[3])
                k = i32(k + 1)
            base = i32(base + BATCH)
        while base < n_vectors:
            # lanes behind the end read the last vector again and store nothing: all stay together for the broadcasts
            at = u64(16) * u64(min(base + lane, n_vectors - 1))
            a = load(src + at)
            k = i32(0)
            while k < n_places:
                to = u64(warp_broadcast_u64(place, k))
                if to != u64(0) and base + lane < n_vectors:
                    store16(to + at, a[0], a[1], a[2], a[3])
                k = i32(k + 1)
            base = i32(base + 32)

    return copy


def store_to_places(n_places):
    """Device function (a, b, c, d, place, n_vectors, offset, lane): each lane's 16 bytes to all places.

    Lane i holds vector i of a run of n_vectors <= 32; the run goes to `offset` bytes behind each place.
    """

    @device_fn
    def store(a, b, c, d, place, n_vectors, offset, lane):
        k = i32(0)
        while k < n_places:
            to = u64(warp_broadcast_u64(place, k))
            if to != u64(0) and lane < n_vectors:
                store16(to + u64(offset) + u64(16) * u64(lane), a, b, c, d)
            k = i32(k + 1)

    return store
