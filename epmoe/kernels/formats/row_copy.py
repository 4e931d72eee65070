"""Copying and clearing a run of bytes by one warp: what every decoder, and the encoders' padding, need."""

from epmoe.device import device_fn, i32, load16, load16_nc, store16, store_u8, u64

BATCH = 4           # loads in flight per lane before the first store: the stores wait for them together
LANES = 32


def copy_vectors(n_bytes: int):
    """Device function (dst, src, lane): one warp copies n_bytes, a multiple of 16, by ordinary 16-byte loads.

    Ordinary loads see what a peer wrote before the signal that this block acquired; the read-only path might not.
    Both addresses are 16-byte aligned.
    """
    return _copy(load16, n_bytes)


def copy_input_vectors(n_bytes: int):
    """As `copy_vectors`, through the read-only path: for arrays that nobody writes while the kernel runs."""
    return _copy(load16_nc, n_bytes)


def _copy(load, n_bytes):
    n_vectors = n_bytes // 16
    last = n_vectors - 1

    @device_fn
    def copy(dst, src, lane):
        i = lane
        while i < n_vectors:
            # Past the end the last vector is read again and not stored: loads need no branch between them.
            a = load(src + u64(16 * i))
            b = load(src + u64(16 * min(i + 32, last)))
            c = load(src + u64(16 * min(i + 64, last)))
            d = load(src + u64(16 * min(i + 96, last)))
            store16(dst + u64(16 * i), a[0], a[1], a[2], a[3])
            if i + 32 < n_vectors:
                store16(dst + u64(16 * (i + 32)), b[0], b[1], b[2], b[3])
            if i + 64 < n_vectors:
                store16(dst + u64(16 * (i + 64)), c[0], c[1], c[2], c[3])
            if i + 96 < n_vectors:
                store16(dst + u64(16 * (i + 96)), d[0], d[1], d[2], d[3])
            i = i32(i + BATCH * LANES)

    return copy


def clear_bytes(n_bytes: int):
    """Device function (dst, lane): one warp writes n_bytes zero bytes; nothing if n_bytes is 0."""

    @device_fn
    def clear(dst, lane):
        i = lane
        while i < n_bytes:
            store_u8(dst + u64(i), 0)
            i = i32(i + LANES)

    return clear
