"""float32 arithmetic in whole numbers: every operation is exact first, then rounded once, to nearest, ties to even.

A number is a Python int counting units of 2**-149 (the smallest float32), so every finite float32 is an int and
+0.0 is 0. -0.0, inf, -inf and nan are Python floats, and nothing else is a float.
No operation here uses the machine's floating point on finite values.
"""

import math

UNIT_EXPONENT = 149  # one unit is 2**-149
ONE = 1 << UNIT_EXPONENT
INF, NAN, NEG_ZERO = math.inf, math.nan, -0.0
_OVERFLOW = 1 << (128 + UNIT_EXPONENT)


def from_bits(bits):
    """The number whose float32 bit pattern is `bits`."""
    sign, exponent, mantissa = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return NAN if mantissa else (-INF if sign else INF)
    units = mantissa if exponent == 0 else (mantissa | 0x800000) << (exponent - 1)
    if units == 0:
        return NEG_ZERO if sign else 0
    return -units if sign else units


def to_bits(x):
    """The float32 bit pattern of a number; every NaN becomes 0x7FC00000."""
    if isinstance(x, float):
        if x != x:
            return 0x7FC00000
        if x == 0:
            return 0x80000000
        return 0x7F800000 if x > 0 else 0xFF800000
    sign, units = (0x80000000, -x) if x < 0 else (0, x)
    shift = units.bit_length() - 24
    if shift <= 0:
        return sign | units  # subnormals and the first binade: the pattern is the count of units
    assert (units >> shift) << shift == units and units < _OVERFLOW, "not a float32"
    return sign | (((shift + 1) << 23) + ((units >> shift) & 0x7FFFFF))


def is_nan(x):
    return x != x


def is_negative(x):
    """The sign bit; also of -0.0."""
    return math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0


def magnitude(x):
    if isinstance(x, float):
        return abs(x) if x else 0
    return -x if x < 0 else x


def round_scaled(n, shift):
    """The float32 nearest to n * 2**-shift units (n an int, not zero)."""
    negative = n < 0
    m = -n if negative else n
    drop = m.bit_length() - 24
    if drop < shift:
        drop = shift  # below 24 bits above a unit the spacing stays one unit
    if drop > 0:
        kept = m >> drop
        rest = m - (kept << drop)
        half = 1 << (drop - 1)
        if rest > half or (rest == half and kept & 1):
            kept += 1
        m = kept << (drop - shift)
    else:
        m <<= -shift
    if m >= _OVERFLOW:
        return -INF if negative else INF
    if negative:
        return -m if m else NEG_ZERO
    return m


def round_ratio(n, d):
    """The float32 nearest to n / d units (n >= 0, d > 0, both ints)."""
    shift = max(n.bit_length() - d.bit_length() - 24, 0)
    if n >= d << (shift + 24):
        shift += 1
    step = d << shift
    kept, rest = divmod(n, step)
    if 2 * rest > step or (2 * rest == step and kept & 1):
        kept += 1
    m = kept << shift
    return INF if m >= _OVERFLOW else m


def _sign_only(x):
    """A float with x's class (zero, finite, infinite, NaN) and sign."""
    return x if isinstance(x, float) else float((x > 0) - (x < 0))


def _special_product(a, b):
    """a * b where one of them is a zero, an infinity or NaN; +0.0 comes back as the int 0."""
    p = _sign_only(a) * _sign_only(b)
    return 0 if p == 0 and not is_negative(p) else p


def _is_special(x):
    return isinstance(x, float) or x == 0


def mul(a, b):
    if _is_special(a) or _is_special(b):
        return _special_product(a, b)
    return round_scaled(a * b, UNIT_EXPONENT)


def add(a, b):
    if isinstance(a, int) and isinstance(b, int):
        n = a + b
        return round_scaled(n, 0) if n else 0
    for x, other in ((a, b), (b, a)):
        if is_nan(x):
            return NAN
        if isinstance(x, float) and x == 0:  # -0.0 changes nothing; -0.0 + -0.0 stays -0.0
            return other
    return _finite_as_zero(a) + _finite_as_zero(b)  # with an infinity; inf - inf is nan


def _finite_as_zero(x):
    return x if isinstance(x, float) else 0.0


def fma(a, b, c):
    """a * b + c with one rounding."""
    if _is_special(a) or _is_special(b):
        return add(_special_product(a, b), c)
    if isinstance(c, float):
        return round_scaled(a * b, UNIT_EXPONENT) if c == 0 else (NAN if is_nan(c) else c)
    n = a * b + (c << UNIT_EXPONENT)
    return round_scaled(n, UNIT_EXPONENT) if n else 0


def div(a, b):
    if is_nan(a) or is_nan(b):
        return NAN
    negative = is_negative(a) != is_negative(b)
    p, q = magnitude(a), magnitude(b)
    if p == INF:
        quotient = NAN if q == INF else INF
    elif q == INF:
        quotient = 0
    elif q == 0:
        quotient = INF if p else NAN
    else:
        quotient = round_ratio(p << UNIT_EXPONENT, q)
    if negative and not is_nan(quotient):
        return -quotient if quotient else NEG_ZERO
    return quotient


def from_fraction(n, d=1):
    """The float32 nearest to the positive fraction n / d."""
    return round_ratio(n << UNIT_EXPONENT, d)
