"""Blockwise FP8 tokens: e4m3 values and one float32 scale for 128 elements; scales are transposed in the output."""

import ml_dtypes
import numpy as np

from epmoe.device import (bf16_hi, bf16_lo, device_fn, div_rn, f32, f32_as_u32, fma_rn, max_f32, mul_rn,
                          output, store_f32, sub_rn, u32, u32_as_f32, u64)

from . import KernelFormat
from .number_codes import e4m3x4
from .row_copy import spread, store_vector
from .row_encoder import values_then_scales, with_scales

GROUP = 128
SCALE_BYTES = 4
PAD_ROWS = 16 // SCALE_BYTES
FLOOR = 1e-4                            # of absmax
PER_448 = float(np.float32(1) / np.float32(448))
INF_BITS = 0x7F800000
SIGN = 0x80000000
output_scales, capacity = output(1), output(2)


@device_fn
def quotient(x, minus_s, r):
    """x / s: the IEEE quotient if its e4m3 code is not zero, otherwise a number with the same code.

    r is 1 / s rounded. One step corrects the product by the exact remainder. In general this need not give the IEEE
    quotient. It does here, as few significands occur, 128 of a bf16 value x times 129 of a scale s (made of a bf16
    absmax, or of the floor 1e-4), and the tests try them all. Exponents only shift them. Likewise for s = 448 and the
    129 numbers that it divides. The remainder of a zero loses the sign of -0, so the sign is taken from x.
    """
    q = mul_rn(x, r)
    q = fma_rn(fma_rn(q, minus_s, x), r, q)
    return u32_as_f32(u32(u32(f32_as_u32(q) & u32(0x7FFFFFFF)) | u32(f32_as_u32(x) & u32(SIGN))))


@device_fn
def quotient_codes(lo, hi, minus_s, r):
    """e4m3 codes of the four bf16 values of two words, each divided by s, as a word. The conversion saturates."""
    return e4m3x4(quotient(bf16_lo(lo), minus_s, r), quotient(bf16_hi(lo), minus_s, r),
                  quotient(bf16_lo(hi), minus_s, r), quotient(bf16_hi(hi), minus_s, r))


@device_fn
def scale_of(absmax, input_scale):
    """(scale of a group with this absmax, (-scale, 1 / scale))."""
    scale = quotient(max_f32(absmax, f32(FLOOR)), f32(-448.0), f32(PER_448))
    minus_s = sub_rn(f32(0.0), scale)
    r = div_rn(f32(1.0), scale)
    if f32_as_u32(absmax) == u32(INF_BITS):
        # Division by Inf: 0 for a finite x, and NaN for Inf, are also 0 * x + 0 * x.
        scale = absmax
        minus_s = f32(0.0)
        r = f32(0.0)
    return scale, (minus_s, r)


@device_fn
def codes_of(ab, factor):
    """Codes in four words of 16 bf16 values in 4 + 4 words. factor: from scale_of."""
    (a, b), (minus_s, r) = ab, factor
    return (quotient_codes(a[0], a[1], minus_s, r), quotient_codes(a[2], a[3], minus_s, r),
            quotient_codes(b[0], b[1], minus_s, r), quotient_codes(b[2], b[3], minus_s, r))


@device_fn
def store_codes(dst_payload, chunk, ab, factor):
    """store_values for with_scales: 16 bytes a lane."""
    store_vector(dst_payload + u64(16 * chunk), codes_of(ab, factor))


def make(cfg) -> KernelFormat:
    """Payload: hidden e4m3 bytes, then hidden / 128 float32 scales.

    Scale: max(absmax, 1e-4) / 448, value: e4m3(clamp(x / scale, -448, 448)), both divisions IEEE (another
    implementation may differ by one ulp of the scale). Outputs: output_tokens [capacity, hidden] e4m3; output_scales
    [hidden / 128, capacity] float32, transposed. Each group's rows are rounded up to 4.
    """
    hidden, n_scales = cfg.hidden, cfg.hidden // GROUP
    spread_scales = spread(SCALE_BYTES, n_scales)

    @device_fn
    def store_scales(out, place, src, lane):
        spread_scales(output_scales(out) + u64(place.row) * u64(SCALE_BYTES), capacity(out) * u64(SCALE_BYTES), src, lane)

    def outputs(cfg, capacity):
        return {"output_tokens": ((capacity, hidden), np.dtype(ml_dtypes.float8_e4m3fn)),
                "output_scales": ((n_scales, capacity), np.dtype(np.float32))}

    quantise = with_scales(GROUP, scale_of, store_codes, store_f32, SCALE_BYTES)
    return values_then_scales(cfg, hidden, n_scales * SCALE_BYTES, GROUP, quantise, store_scales, outputs, pad_rows=PAD_ROWS)
