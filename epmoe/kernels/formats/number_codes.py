"""The small floats of the formats as integer codes: e2m1, e4m3fn, and the power-of-two scale e8m0.

e2m1 (4 bits, FP4), for which sm_90 has no instruction: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Two
codes a byte, the even element in the low nibble. e4m3fn (8 bits, FP8): the hardware's conversion, to nearest even,
saturating, NaN -> 0x7F. e8m0: a byte b means 2**(b - 127), and 0xFF means NaN.
"""

from epmoe.device import (abs_f32, add_rn, bf16_hi, bf16_lo, device_fn, f32, f32_as_u32, max_f32, min_f32,
                          mul_rn, pack_e4m3x2, u32, u32_as_f32)

ONE_BITS = 0x3F800000               # float32 1.0
EXPONENT = 0x7F800000
# The ulp of 2**22 is 1/2, of 2**23 it is 1, and so on. Adding 2**22 times a number's power of two rounds it as e2m1.
MAGIC_BITS = 22 << 23
# Two codes to a binade, and exponent and magic are both in the sum's exponent field.
BIAS = 2 * (127 + 22)
NAN_BITS = 0x7FC00000
BITS_OF_2_TO_MINUS_127 = 0x00400000     # float32 subnormal


@device_fn
def e2m1_code(v):
    """float32 -> code (u32, 4 bits): to nearest, ties to even, saturating at 6; sign kept, also on zero; NaN -> +6.

    In [1, 2) codes are 1/2 apart, as below 1; in [2, 4) 1, from 4 on 2. So the power of two of |v|, but at least 1,
    times 2**22 is added: the hardware's rounding of the sum is the one wanted, and leaves |v| in steps in the low bits.
    """
    v = max_f32(min_f32(v, f32(6.0)), f32(-6.0))        # min.f32 makes 6 of NaN
    bits = f32_as_u32(v)
    power = u32(max(u32(bits & u32(EXPONENT)), u32(ONE_BITS)))
    magic = u32_as_f32(u32(power + u32(MAGIC_BITS)))
    s = f32_as_u32(add_rn(abs_f32(v), magic))
    steps = u32(u32(s & u32(7)) + u32(s >> u32(22)) - u32(BIAS))
    return u32(steps | u32(u32(bits >> u32(28)) & u32(8)))


@device_fn
def e2m1x2(word, k):
    """Two bf16 values of a word, each times k (rounded to float32), as a byte of two codes (u32)."""
    lo, hi = e2m1_code(mul_rn(bf16_lo(word), k)), e2m1_code(mul_rn(bf16_hi(word), k))
    return u32(lo | u32(hi << u32(4)))


@device_fn
def e2m1x8(q, k):
    """The 8 bf16 values of 4 words, each times k, as a word of eight codes (u32)."""
    lo = u32(e2m1x2(q[0], k) | u32(e2m1x2(q[1], k) << u32(8)))
    hi = u32(e2m1x2(q[2], k) | u32(e2m1x2(q[3], k) << u32(8)))
    return u32(lo | u32(hi << u32(16)))


@device_fn
def e4m3_byte(v):
    """float32 -> one code (u32, 8 bits)."""
    return u32(pack_e4m3x2(v, f32(0.0)) & u32(0xFF))


@device_fn
def e4m3x4(a, b, c, d):
    """Four float32 values as a word of four codes (u32), a in the lowest byte."""
    return u32(pack_e4m3x2(a, b) | u32(pack_e4m3x2(c, d) << u32(16)))


@device_fn
def scaled_e4m3x4(lo, hi, k):
    """The four bf16 values of two words, each times k (rounded to float32), as a word of four codes (u32)."""
    return e4m3x4(mul_rn(bf16_lo(lo), k), mul_rn(bf16_hi(lo), k), mul_rn(bf16_lo(hi), k), mul_rn(bf16_hi(hi), k))


@device_fn
def e8m0_round_up(v):
    """float32 -> byte (u32): the least power of two that is not below |v|; 2**127 is the largest; NaN, Inf -> 0xFF."""
    magnitude = u32(f32_as_u32(v) & u32(0x7FFFFFFF))
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
    byte = u32(u32(magnitude + u32(0x7FFFFF)) >> u32(23))
    if magnitude <= u32(BITS_OF_2_TO_MINUS_127):
        byte = u32(0)
    if magnitude > u32(0x7F000000):
        byte = u32(0xFE)
    if magnitude >= u32(0x7F800000):
        byte = u32(0xFF)
    return byte


@device_fn
def e8m0_reciprocal(byte):
    """1 / 2**(byte - 127) as float32, exact for every byte, NaN for 0xFF."""
    bits = u32(u32(u32(254) - byte) << u32(23))
    if byte == u32(254):
        bits = u32(BITS_OF_2_TO_MINUS_127)
    if byte == u32(255):
        bits = u32(NAN_BITS)
    return u32_as_f32(bits)
