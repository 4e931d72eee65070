"""Exact float32 operations. Each rounds once, and no compiler fuses or splits them.

A function written with them (an epilogue, router weights, an input scale) gives the same bits in NumPy and on the
device. They broadcast, convert arguments to float32, and keep subnormals. The bits of a NaN result are unspecified.
"""

import numpy as np

_LOST_BITS = np.int64((1 << 29) - 1)  # of a float64 significand, when it becomes a float32
_TIE = np.int64(1 << 28)
_MIN_NORMAL = np.float32(2.0**-126)


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

    The product of two float32 is exact in float64. Its float64 sum with c, rounded again to float32, is wrong only if
    the first rounding ended exactly half way between two float32. These few sums are rounded to odd first.
    """
    with np.errstate(all="ignore"):
        a, b, c = _f32(a), _f32(b), _f32(c)
        shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
        a, b, c = (np.atleast_1d(x).astype(np.float64) for x in (a, b, c))
        product = a * b
        total = product + c
        result = total.astype(np.float32)
        doubtful = _may_round_twice(total, result)
        if len(doubtful):
            product, c = (np.broadcast_to(x, total.shape).reshape(-1)[doubtful] for x in (product, c))
            result.reshape(-1)[doubtful] = _round_to_odd(product, c, total.reshape(-1)[doubtful])
    return result.reshape(shape)[()]


def _f32(x):
    return np.asarray(x, dtype=np.float32)


def _may_round_twice(total: np.ndarray, result: np.ndarray) -> np.ndarray:
    doubtful = (total.view(np.int64) & _LOST_BITS) == _TIE
    # A subnormal float32 loses more than 29 bits, so its ties look different. All subnormals are computed again.
    small = np.abs(result) <= _MIN_NORMAL
    if small.any():
        doubtful |= small & (total != 0)
    return np.flatnonzero(doubtful)


def _round_to_odd(product: np.ndarray, c: np.ndarray, total: np.ndarray) -> np.ndarray:
    c_part = total - product
    # Knuth's two-sum: product + c == total + error, exactly
    error = (product - (total - c_part)) + (c - c_part)
    even = (total.view(np.int64) & 1) == 0
    odd_total = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(even & (error != 0) & np.isfinite(error), odd_total, total).astype(np.float32)
