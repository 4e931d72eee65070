"""Encoded rows of small batches: encoded in registers, sent from there into windows; their scales go to experts' rows."""

from epmoe.device import (device_fn, f32, ffs, i32, load_u32, store16, store_f32, store_u32, u32, u64,
                          warp_broadcast_u64)

from ..formats import blockwise_fp8
from ..formats.row_encoder import encode_parts, encode_row
from .row_copy import rotated
from .senders import A_SCALE, STEP


def encoder(shape):
    """Device function (src, to, mask, start, first, end, lane): a warp makes vectors [first, end) of an encoded row.

    Whole steps of the encoder. They go, with their scales, from registers to the rows at `to` of each lane in `mask`,
    beginning with lane `start`.
    """
    value_bytes, quantised = shape.value_bytes, blockwise_fp8.quantised

    @device_fn
    def put(rows, chunk, there, ab, absmax, input_scale, lane):
        (scale, codes), (to, left, start) = quantised(ab[0], ab[1], absmax), rows
        while left != u32(0):
            at = u64(warp_broadcast_u64(to, i32((ffs(left) - 1 + start) & 31)))
            if there:
                store16(at + u64(16 * chunk), codes[0], codes[1], codes[2], codes[3])
                if lane & (A_SCALE - 1) == 0:
                    store_f32(at + u64(value_bytes) + u64(4 * i32(chunk >> 3)), scale)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def no_rest(rows, lane):
        return

    _, encode_part = encode_row(value_bytes, blockwise_fp8.GROUP, put, no_rest)
    n_steps = encode_parts(value_bytes)

    @device_fn
    def encode(src, to, mask, start, first, end, lane):
        rows, step = (to, rotated(mask, start), start), i32(first // STEP)
        while mask != u32(0) and STEP * step < end:
            encode_part(src, rows, f32(1), step, n_steps, lane)
            step = i32(step + 1)

    return encode


def scale_sender(shape):
    """Device function (src, first, end, to, mask, lane): a warp; the scales of vectors [first, end) of an encoded row.

    From the address of the first of all its scales to those at `to` of each lane in `mask`.
    """
    n_scales = shape.scale_words

    @device_fn
    def send_scales(src, first, end, to, mask, lane):
        base, behind = i32(first // A_SCALE), i32(min(i32(u32(end + A_SCALE - 1) // u32(A_SCALE)), n_scales))
        while base < behind:
            i, left = i32(base + lane), u32(mask)
            at = u64(4) * u64(min(i, i32(behind - 1)))
            scale = u32(load_u32(src + at))
            while left != u32(0):
                there = u64(warp_broadcast_u64(to, i32(ffs(left) - 1)))
                if i < behind:
                    store_u32(there + at, scale)
                left = u32(left & u32(left - u32(1)))
            base = i32(base + 32)

    return send_scales
