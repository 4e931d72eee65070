"""Small number types as lists of all their values; a cast finds the nearest value, a tie goes to the even code.

Numbers are as in exact_float32 (ints in units of 2**-149, floats for -0.0, inf and NaN).
"""

from bisect import bisect_left

import exact_float32 as f32


def _table(exponent_bits, mantissa_bits, bias, codes):
    """Values of the non-negative codes 0 .. codes - 1 of a sign-less floating-point type, in units of 2**-149."""
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        whole = mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)
        power = max(exponent, 1) - bias - mantissa_bits + f32.UNIT_EXPONENT
        values.append(whole << power if power >= 0 else whole >> -power)
    return values


E4M3 = _table(4, 3, 7, 0x7F)  # 0x00 .. 0x7E = 448; 0x7F is NaN, there is no infinity
# 2**-127 .. 2**127; 0xFF is NaN
E8M0 = [1 << (code - 127 + f32.UNIT_EXPONENT) for code in range(255)]
E2M1 = _table(2, 1, 1, 8)  # 0 .5 1 1.5 2 3 4 6
# the last entry stands for infinity, 2**128: rounding to it overflows
BF16 = _table(8, 7, 127, 0x7F81)
FP16 = _table(5, 10, 15, 0x7C01)  # likewise 2**16


def nearest(table, m):
    """The code whose value is nearest to the magnitude m; past the end the last code."""
    above = bisect_left(table, m)
    if above == len(table):
        return above - 1
    if table[above] == m or above == 0:
        return above
    up, down = table[above] - m, m - table[above - 1]
    if up == down:
        return above if above % 2 == 0 else above - 1
    return above if up < down else above - 1


def to_e4m3(x):
    """Round to nearest even, saturating at +-448; NaN is 0x7F with either sign."""
    if f32.is_nan(x):
        return 0x7F
    return (0x80 if f32.is_negative(x) else 0) | nearest(E4M3, f32.magnitude(x))


def from_e4m3(code):
    return f32.NAN if code & 0x7F == 0x7F else _signed(E4M3[code & 0x7F], code & 0x80)


def to_e2m1(x):
    """Round to nearest even, saturating at +-6; NaN is +6."""
    if f32.is_nan(x):
        return 0x7
    return (0x8 if f32.is_negative(x) else 0) | nearest(E2M1, f32.magnitude(x))


def from_e2m1(code):
    return _signed(E2M1[code & 7], code & 8)


def to_e8m0(x):
    """The smallest power of two 2**(code - 127) that is not below |x|; up to 2**-127 code 0, over 2**127 code 254."""
    if f32.is_nan(x) or f32.magnitude(x) == f32.INF:
        return 0xFF
    m = f32.magnitude(x)
    return min(bisect_left(E8M0, m), 254)


def from_e8m0(code):
    return f32.NAN if code == 0xFF else E8M0[code]


def _signed(m, negative):
    return (-m if m else f32.NEG_ZERO) if negative else m


class Float16Bits:
    """bf16 or fp16: bits to number and number to bits."""

    def __init__(self, table, quiet_nan):
        self.table, self.infinity, self.quiet_nan = table, len(table) - 1, quiet_nan

    def from_bits(self, bits):
        code = bits & 0x7FFF
        if code > self.infinity:
            return f32.NAN
        if code == self.infinity:
            return -f32.INF if bits & 0x8000 else f32.INF
        return _signed(self.table[code], bits & 0x8000)

    def to_bits(self, x):
        if f32.is_nan(x):
            return self.quiet_nan
        m = f32.magnitude(x)
        code = self.infinity if m == f32.INF else nearest(self.table, m)
        return (0x8000 if f32.is_negative(x) else 0) | code

    def is_nan_bits(self, bits):
        return bits & 0x7FFF > self.infinity


class Float32Bits:
    """float32 with the same two functions."""

    from_bits = staticmethod(f32.from_bits)
    to_bits = staticmethod(f32.to_bits)

    @staticmethod
    def is_nan_bits(bits):
        return bits & 0x7FFFFFFF > 0x7F800000


OUTPUT_TYPES = {"bf16": Float16Bits(BF16, 0x7FC0), "fp16": Float16Bits(FP16, 0x7E00), "fp32": Float32Bits()}
BF16_BITS = OUTPUT_TYPES["bf16"]
