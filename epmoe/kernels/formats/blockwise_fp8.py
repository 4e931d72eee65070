"""Blockwise FP8 tokens: e4m3 values and one float32 scale for 128 elements; scales come out transposed."""

import ml_dtypes
import numpy as np

from epmoe.device import (bf16_hi, bf16_lo, device_fn, div_rn, f32, f32_as_u32, fma_rn, i32, load16_nc, load_u32, load_u64,
                          max_f32, mul_rn, shfl_xor, store16, store_f32, store_u32, u32, u32_as_f32, u64)

from .absmax import absmax8
from .e4m3 import e4m3x4
from .kernel_format import KernelFormat, align_up
from .row_copy import clear_bytes, copy_vectors

GROUP = 128
SCALE_BYTES = 4
PAD_ROWS = 16 // SCALE_BYTES
LANES = 32
LANE_ELEMENTS = 16                      # of a row in one step: 32 bytes in, one 16-byte store out
GROUP_LANES = GROUP // LANE_ELEMENTS
INF_BITS = 0x7F800000
SIGN = 0x80000000


@device_fn
def quotient(x, s, r):
    """x / s, the IEEE quotient wherever its e4m3 code is not zero, and elsewhere a number of the same code.

    x: bf16 value; s: the group's scale, but 0 where that is Inf; r: 1 / s rounded, but 0 where s was Inf. One step
    of correction by the exact remainder. That it gives the IEEE quotient is not a general theorem: it holds for the
    129 significands that a scale can have (absmax is a bf16 value, or the floor 1e-4) times the 128 of a bf16 value,
    which the tests try one by one; exponents only shift them. The remainder of a zero would lose the sign of -0.
    With s = r = 0 a finite x gives 0 and Inf gives NaN, as division by Inf does.
    """
    q = mul_rn(x, r)
    q = fma_rn(fma_rn(u32_as_f32(u32(f32_as_u32(q) ^ u32(SIGN))), s, x), r, q)
    return u32_as_f32(u32(u32(f32_as_u32(q) & u32(0x7FFFFFFF)) | u32(f32_as_u32(x) & u32(SIGN))))


@device_fn
def quotient_codes(lo, hi, s, r):
    """e4m3 codes of the four bf16 values of two words, each divided by s, as a word. The conversion saturates."""
    return e4m3x4(quotient(bf16_lo(lo), s, r), quotient(bf16_hi(lo), s, r),
                  quotient(bf16_lo(hi), s, r), quotient(bf16_hi(hi), s, r))


def make(cfg) -> KernelFormat:
    """Payload: hidden e4m3 bytes, then hidden / 128 float32 scales.

    Scale: max(absmax, 1e-4) / 448, value: e4m3(clamp(x / scale, -448, 448)), both divisions IEEE (another implementation
    may differ by one ulp of the scale). Outputs: output_tokens [capacity, hidden] e4m3; output_scales
    [hidden / 128, capacity] float32, transposed. Each group's rows are rounded up to 4.
    """
    hidden = cfg.hidden
    n_scales = hidden // GROUP
    scales_at = align_up(hidden, cfg.alignment)
    token_size = scales_at + align_up(n_scales * SCALE_BYTES, cfg.alignment)
    n_chunks = hidden // LANE_ELEMENTS
    copy_values = copy_vectors(hidden)
    clear_after_values = clear_bytes(scales_at - hidden)
    clear_after_scales = clear_bytes(token_size - scales_at - n_scales * SCALE_BYTES)

    @device_fn
    def encode(src_row, dst_payload, input_scale, lane):
        start = 0
        while start < n_chunks:
            # All lanes take every step, for the shuffles; past the end they repeat the last group and store nothing.
            chunk = i32(start + lane)
            src = src_row + u64(32 * min(chunk, n_chunks - GROUP_LANES + lane % GROUP_LANES))
            a = load16_nc(src)
            b = load16_nc(src + u64(16))
            absmax = absmax8(b, absmax8(a, f32(0.0)))
            absmax = max_f32(absmax, shfl_xor(absmax, 1))
            absmax = max_f32(absmax, shfl_xor(absmax, 2))
            absmax = max_f32(absmax, shfl_xor(absmax, 4))
            scale = div_rn(max_f32(absmax, f32(1e-4)), f32(448.0))
            s = scale
            if f32_as_u32(scale) == u32(INF_BITS):
                s = f32(0.0)
            r = div_rn(f32(1.0), scale)
            if chunk < n_chunks:
                store16(dst_payload + u64(16 * chunk),
                        quotient_codes(a[0], a[1], s, r), quotient_codes(a[2], a[3], s, r),
                        quotient_codes(b[0], b[1], s, r), quotient_codes(b[2], b[3], s, r))
                if lane % GROUP_LANES == 0:
                    store_f32(dst_payload + u64(scales_at + SCALE_BYTES * (chunk // GROUP_LANES)), scale)
            start += LANES
        clear_after_values(dst_payload + u64(hidden), lane)
        clear_after_scales(dst_payload + u64(scales_at + n_scales * SCALE_BYTES), lane)

    @device_fn
    def decode(payload, out, row, group, row_in_group, group_start, lane):
        scales = load_u64(out + u64(8)) + u64(row) * u64(SCALE_BYTES)
        column_bytes = load_u64(out + u64(16)) * u64(SCALE_BYTES)
        g = lane
        while g < n_scales:
            store_u32(scales + u64(g) * column_bytes, load_u32(payload + u64(scales_at + SCALE_BYTES * g)))
            g = i32(g + LANES)
        copy_values(load_u64(out) + u64(row) * u64(hidden), payload, lane)

    def outputs(cfg, capacity):
        return {"output_tokens": ((capacity, cfg.hidden), np.dtype(ml_dtypes.float8_e4m3fn)),
                "output_scales": ((cfg.hidden // GROUP, capacity), np.dtype(np.float32))}

    return KernelFormat(token_size, False, PAD_ROWS, ("output_tokens", "output_scales"), outputs, encode, decode)
