"""MXFP4 tokens with "even" scales: row-major scales, or the slot layout of fuse_a_scale_preshuffle."""

import ml_dtypes
import numpy as np

from epmoe.device import device_fn, f32, f32_as_u32, i32, load16_nc, load_u8, load_u64, store16, store_u8, u32, u64

from .absmax import absmax8
from .e2m1 import e2m1x8
from .e8m0 import e8m0_reciprocal
from .kernel_format import KernelFormat, align_up
from .row_copy import clear_bytes, copy_vectors
from .slot_scales import slots_shape, store_slot_scales

GROUP = 32
LANES = 32


@device_fn
def even_scale(absmax):
    """e8m0 byte (u32) that puts absmax, rounded to two significant bits, into [4, 8): clamp(... - 2, 0, 254)."""
    exponent = u32(u32(u32(f32_as_u32(absmax) + u32(1 << 21)) >> u32(23)) & u32(0xFF))
    return u32(u32(max(exponent, u32(2))) - u32(2))     # at most 253, so the upper clamp has nothing to do


def make(cfg) -> KernelFormat:
    """Payload: hidden / 2 packed bytes, then hidden / 32 e8m0 scale bytes.

    Scale byte: clamp((((bits(absmax) + 2**21) >> 23) & 0xFF) - 2, 0, 254); value: e2m1(x / 2**(byte - 127)). Outputs:
    output_tokens [capacity, hidden / 2] uint8; output_scales e8m0 [capacity, hidden / 32], or with
    fuse_a_scale_preshuffle slots [groups, Mpad / 32, hidden / 256, 256], where bytes of unused rows are unspecified.
    """
    value_bytes = cfg.hidden // 2
    n_scales = cfg.hidden // GROUP
    scales_at = align_up(value_bytes, cfg.alignment)
    token_size = scales_at + align_up(n_scales, cfg.alignment)
    slots = cfg.fuse_a_scale_preshuffle
    clear_after_values = clear_bytes(scales_at - value_bytes)
    clear_after_scales = clear_bytes(token_size - scales_at - n_scales)
    copy_values = copy_vectors(value_bytes)
    store_scales = store_slot_scales(cfg) if slots else store_scale_row(n_scales)

    @device_fn
    def encode(src_row, dst_payload, input_scale, lane):
        chunk = lane
        while chunk < n_scales:
            src = src_row + u64(64 * chunk)
            a, b, c, d = load16_nc(src), load16_nc(src + u64(16)), load16_nc(src + u64(32)), load16_nc(src + u64(48))
            byte = even_scale(absmax8(d, absmax8(c, absmax8(b, absmax8(a, f32(0.0))))))
            # The product with the exact reciprocal of a power of two is the quotient, rounded once, subnormals included.
            k = e8m0_reciprocal(byte)
            store16(dst_payload + u64(16 * chunk), e2m1x8(a, k), e2m1x8(b, k), e2m1x8(c, k), e2m1x8(d, k))
            store_u8(dst_payload + u64(scales_at + chunk), byte)
            chunk = i32(chunk + LANES)
        clear_after_values(dst_payload + u64(value_bytes), lane)
        clear_after_scales(dst_payload + u64(scales_at + n_scales), lane)

    @device_fn
    def decode(payload, out, row, group, row_in_group, group_start, lane):
        store_scales(load_u64(out + u64(8)), row, group, row_in_group, payload + u64(scales_at), lane)
        copy_values(load_u64(out) + u64(row) * u64(value_bytes), payload, lane)

    def outputs(cfg, capacity):
        return {"output_tokens": ((capacity, value_bytes), np.dtype(np.uint8)),
                "output_scales": (slots_shape(cfg) if slots else (capacity, n_scales),
                                  np.dtype(ml_dtypes.float8_e8m0fnu))}

    return KernelFormat(token_size, False, 1, ("output_tokens", "output_scales"), outputs, encode, decode)


def store_scale_row(n_scales):
    """Device function (scales, row, group, row_in_group, src, lane): the scale bytes at src to row `row` of the output.

    Byte by byte: with an odd n_scales rows are not aligned.
    """

    @device_fn
    def store(scales, row, group, row_in_group, src, lane):
        dst = scales + u64(row) * u64(n_scales)
        k = lane
        while k < n_scales:
            store_u8(dst + u64(k), load_u8(src + u64(k)))
            k = i32(k + LANES)

    return store
