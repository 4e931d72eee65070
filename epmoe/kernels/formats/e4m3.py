"""e4m3fn, the 8-bit float of the FP8 formats: the hardware's conversion, to nearest even, saturating, NaN -> 0x7F."""

from epmoe.device import bf16_hi, bf16_lo, device_fn, e4m3_lo, f32, mul_rn, pack_e4m3x2, u32


@device_fn
def e4m3_byte(v):
    """float32 -> one code (u32, 8 bits)."""
    return u32(pack_e4m3x2(v, f32(0.0)) & u32(0xFF))


@device_fn
def e4m3_value(byte):
    """One code (u32) -> float32."""
    return e4m3_lo(byte)


@device_fn
def e4m3x4(a, b, c, d):
    """Four float32 values as a word of four codes (u32), a in the lowest byte."""
    return u32(pack_e4m3x2(a, b) | u32(pack_e4m3x2(c, d) << u32(16)))


@device_fn
def scaled_e4m3x4(lo, hi, k):
    """The four bf16 values of two words, each times k (rounded to float32), as a word of four codes (u32)."""
    return e4m3x4(mul_rn(bf16_lo(lo), k), mul_rn(bf16_hi(lo), k), mul_rn(bf16_lo(hi), k), mul_rn(bf16_hi(hi), k))
