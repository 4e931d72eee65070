"""The exact words: float32 operations with one rounding each, which no compiler fuses or splits.

A function written with them (an epilogue, router weights, an input scale) gives the same bits in NumPy and on the
device. They broadcast; arguments are taken as float32; subnormals are kept. Which NaN results is unspecified.
"""

import numpy as np

_LOST_BITS = np.int64((1 << 29) - 1)        # of a float64 significand, when it becomes a float32
_TIE = np.int64(1 << 28)
_MIN_NORMAL = 2.0**-126


def mul_rn(a, b):
    """a * b, rounded once to nearest even. a, b: float32, broadcast."""
    with np.errstate(all="ignore"):
        return np.multiply(_f32(a), _f32(b))


def add_rn(a, b):
    """a + b, rounded once to nearest even. a, b: float32, broadcast."""
    with np.errstate(all="ignore"):
        return np.add(_f32(a), _f32(b))


def fma_rn(a, b, c):
    """a * b + c, rounded once to nearest even: the fused multiply-add. a, b, c: float32, broadcast.

    The product of two float32 is exact in float64. Its float64 sum with c, rounded again to float32, is wrong only
    where the first rounding ended exactly half way between two float32; those few are rounded to odd first.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(_f32(a), _f32(b), dtype=np.float64)
        total = np.add(product, _f32(c), dtype=np.float64)
        result = np.asarray(total, dtype=np.float32)
        doubtful = _may_round_twice(np.asarray(total))
        if doubtful.any():
            product, total, c = (np.broadcast_to(x, doubtful.shape)[doubtful] for x in (product, total, _f32(c)))
            result[doubtful] = _round_to_odd(product, c.astype(np.float64), total)
    return result[()]


def _f32(x):
    return np.asarray(x, dtype=np.float32)


def _may_round_twice(total: np.ndarray) -> np.ndarray:
    bits = total.view(np.int64)
    ties = (bits & _LOST_BITS) == _TIE
    # A subnormal float32 loses more bits than 29, so its ties look different: all of them are worked out again.
    small = np.abs(total) < _MIN_NORMAL
    if small.any():
        ties |= small & (total != 0)
    return ties


def _round_to_odd(product, c, total):
    c_part = total - product
    error = (product - (total - c_part)) + (c - c_part)        # Knuth's two-sum: product + c == total + error, exactly
    even = (total.view(np.int64) & 1) == 0
    odd_total = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(even & (error != 0) & np.isfinite(error), odd_total, total).astype(np.float32)
