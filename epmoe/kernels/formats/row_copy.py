"""Copying a run of bytes by one warp, in 16-byte vectors: what every decoder and the bf16 encoder do."""

from epmoe.device import device_fn, load16, load16_nc, store16, u64


def copy_vectors(n_bytes: int):
    """Device function (dst, src, lane): one warp copies n_bytes, a multiple of 16, by ordinary loads.

    Ordinary loads see what a peer wrote before the signal that this block acquired; the read-only path might not.
    Both addresses are 16-byte aligned. Four loads are in flight before the first store.
    """
    return _copy(load16, n_bytes)


def copy_input_vectors(n_bytes: int):
    """As `copy_vectors`, through the read-only path: for arrays that nobody writes while the kernel runs."""
    return _copy(load16_nc, n_bytes)


def _copy(load, n_bytes):
    n_vectors = n_bytes // 16
    n_batched = n_vectors // 128 * 128

    @device_fn
    def copy(dst, src, lane):
        i = lane
        while i < n_batched:
            s = src + u64(16 * i)
            a = load(s)
            b = load(s + u64(512))
            c = load(s + u64(1024))
            d = load(s + u64(1536))
            t = dst + u64(16 * i)
            store16(t, a[0], a[1], a[2], a[3])
            store16(t + u64(512), b[0], b[1], b[2], b[3])
            store16(t + u64(1024), c[0], c[1], c[2], c[3])
            store16(t + u64(1536), d[0], d[1], d[2], d[3])
            i += 128
        while i < n_vectors:
            a = load(src + u64(16 * i))
            store16(dst + u64(16 * i), a[0], a[1], a[2], a[3])
            i += 32

    return copy


def clear_vectors(n_bytes: int):
    """Device function (dst, lane): one warp writes n_bytes zero bytes, a multiple of 16; none if n_bytes is 0."""
    n_vectors = n_bytes // 16

    @device_fn
    def clear(dst, lane):
        i = lane
        while i < n_vectors:
            store16(dst + u64(16 * i), 0, 0, 0, 0)
            i += 32

    return clear
