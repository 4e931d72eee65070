"""The largest magnitude of a group: starts from 0 and ignores NaN, as the instruction max.f32 does."""

from epmoe.device import abs_f32, bf16_hi, bf16_lo, device_fn, max_f32


@device_fn
def absmax8(q, m):
    """max(m, |x|) over the 8 bf16 values of one 16-byte load q (4 words)."""
    m = max_f32(m, abs_f32(bf16_lo(q[0])))
    m = max_f32(m, abs_f32(bf16_hi(q[0])))
    m = max_f32(m, abs_f32(bf16_lo(q[1])))
    m = max_f32(m, abs_f32(bf16_hi(q[1])))
    m = max_f32(m, abs_f32(bf16_lo(q[2])))
    m = max_f32(m, abs_f32(bf16_hi(q[2])))
    m = max_f32(m, abs_f32(bf16_lo(q[3])))
    return max_f32(m, abs_f32(bf16_hi(q[3])))
