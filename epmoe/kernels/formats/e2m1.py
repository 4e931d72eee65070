"""e2m1, the 4-bit float of the FP4 formats, as integer code: sm_90 has no instruction for it.

Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Two codes a byte, the even element in the low nibble.
"""

from epmoe.device import add_rn, bf16_hi, bf16_lo, device_fn, f32, f32_as_u32, mul_rn, u32, u32_as_f32

# float32 in [2**22, 2**23) has an ulp of 1/2: the addition itself rounds to multiples of 1/2, ties to even.
HALVES = 4194304.0
TWO_BITS = 0x40000000               # float32 2.0
INF_BITS = 0x7F800000
# From 2.0 on, the code is exponent and one mantissa bit, that is bits >> 22, and 2.0 has code 4.
ROUND_BIT = 22
BIAS = (TWO_BITS >> ROUND_BIT) - 4


@device_fn
def e2m1_code(v):
    """float32 -> code (u32, 4 bits): to nearest, ties to even, saturating at 6; sign kept, also on zero; NaN -> +6."""
    bits = f32_as_u32(v)
    magnitude = u32(bits & u32(0x7FFFFFFF))
    sign = u32(u32(bits >> u32(28)) & u32(8))
    if magnitude > u32(INF_BITS):
        sign = u32(0)
    even = u32(u32(magnitude >> u32(ROUND_BIT)) & u32(1))
    large = u32(u32(u32(magnitude + u32(0x1FFFFF) + even) >> u32(ROUND_BIT)) - u32(BIAS))
    code = u32(min(large, u32(7)))
    if magnitude < u32(TWO_BITS):
        code = u32(f32_as_u32(add_rn(u32_as_f32(magnitude), f32(HALVES))) & u32(7))
    return u32(code | sign)


@device_fn
def e2m1x2(word, k):
    """Two bf16 values of a word, each times k (rounded to float32), as a byte of two codes (u32)."""
    lo = e2m1_code(mul_rn(bf16_lo(word), k))
    hi = e2m1_code(mul_rn(bf16_hi(word), k))
    return u32(lo | u32(hi << u32(4)))


@device_fn
def e2m1x8(q, k):
    """The 8 bf16 values of a 16-byte load q, each times k, as a word of eight codes (u32)."""
    lo = u32(e2m1x2(q[0], k) | u32(e2m1x2(q[1], k) << u32(8)))
    hi = u32(e2m1x2(q[2], k) | u32(e2m1x2(q[3], k) << u32(8)))
    return u32(lo | u32(hi << u32(16)))
