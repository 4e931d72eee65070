"""Arithmetic intrinsics. f32 values are np.float32, rounded exactly like the PTX instructions. Arrays broadcast."""

import math
import struct

import ml_dtypes
import numpy as np

F32 = np.float32
MASK32 = 0xFFFFFFFF
_NAN = F32(np.nan)
_BF16_VALUES = (np.arange(1 << 16, dtype=np.uint32) << 16).view(F32)
_F16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(F32)
_bits16, _bits32 = struct.Struct("=H").unpack, struct.Struct("=I").unpack


def u64(x):
    """x as an unsigned 64-bit integer."""
    return (x if x.__class__ is int else int(x)) & 0xFFFFFFFFFFFFFFFF


def u32(x):
    """x as an unsigned 32-bit integer."""
    return (x if x.__class__ is int else int(x)) & MASK32


def i32(x):
    """x as a signed 32-bit integer."""
    if x.__class__ is int and -0x80000000 <= x <= 0x7FFFFFFF:
        return x
    return (int(x) + 0x80000000 & MASK32) - 0x80000000


def f32(x):
    """x rounded to float32."""
    return x if x.__class__ is F32 else F32(x)


def f32_as_u32(x):
    """The bits of an f32."""
    return _bits32(f32(x))[0]


def u32_as_f32(x):
    """The f32 with these bits."""
    return np.uint32(x & MASK32).view(F32)


def bf16_lo(x):
    """The bf16 in bits 0..15, as f32."""
    return _BF16_VALUES[x & 0xFFFF]


def bf16_hi(x):
    """The bf16 in bits 16..31, as f32."""
    return _BF16_VALUES[x >> 16 & 0xFFFF]


def _bf16_bits(x):
    u = f32_as_u32(x)
    if u & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF  # the result of cvt.rn.bf16 for every NaN
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16


def pack_bf16x2(lo, hi):
    """Two f32 rounded to bf16 (nearest even); lo in bits 0..15."""
    return _bf16_bits(hi) << 16 | _bf16_bits(lo)


def f16_lo(x):
    """The f16 in bits 0..15, as f32."""
    return _F16_VALUES[x & 0xFFFF]


def f16_hi(x):
    """The f16 in bits 16..31, as f32."""
    return _F16_VALUES[x >> 16 & 0xFFFF]


def _f16_bits(x):
    x = f32(x)
    return 0x7FFF if x != x else _bits16(np.float16(x))[0]


def pack_f16x2(lo, hi):
    """Two f32 rounded to f16 (nearest even); lo in bits 0..15."""
    return _f16_bits(hi) << 16 | _f16_bits(lo)


E4M3 = ml_dtypes.float8_e4m3fn
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(F32)


def _e4m3_bits(x):
    x = f32(x)
    if x != x:
        return 0x7F
    if abs(x) >= 448:  # satfinite: infinities too
        return 0xFE if x < 0 else 0x7E
    return E4M3(x).tobytes()[0]


def pack_e4m3x2(lo, hi):
    """Two f32 rounded to e4m3 (nearest even, saturating); lo in bits 0..7, hi in bits 8..15."""
    return _e4m3_bits(hi) << 8 | _e4m3_bits(lo)


def e4m3_lo(x):
    """The e4m3 in bits 0..7, as f32."""
    return _E4M3_VALUES[x & 0xFF]


def e4m3_hi(x):
    """The e4m3 in bits 8..15, as f32."""
    return _E4M3_VALUES[x >> 8 & 0xFF]


def mul_rn(a, b):
    """a * b, rounded once to nearest even, subnormals kept. float32; on the host also arrays, which broadcast."""
    return a * b if a.__class__ is F32 is b.__class__ else F32(a) * F32(b)


def add_rn(a, b):
    """a + b, rounded once to nearest even, subnormals kept. float32; on the host also arrays, which broadcast."""
    return a + b if a.__class__ is F32 is b.__class__ else F32(a) + F32(b)


def sub_rn(a, b):
    """a - b, rounded once."""
    return f32(a) - f32(b)


def div_rn(a, b):
    """a / b, rounded once."""
    return f32(a) / f32(b)


def fma_rn(a, b, c):
    """a * b + c, rounded once.

    The product of two float32 is exact in float64. Its float64 sum with c is rounded to odd (the error of the addition
    says whether the sum is exact). Rounding that to float32 then gives the same bits as one rounding.
    """
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or isinstance(c, np.ndarray):
        return _fma_arrays(np.asarray(a, F32), np.asarray(b, F32), np.asarray(c, F32))
    p, c = float(a) * float(b), float(c)
    s = p + c
    z = s - p
    error = (p - (s - z)) + (c - z)
    if error and math.isfinite(s) and not struct.pack("<d", s)[0] & 1:
        s = math.nextafter(s, math.inf if error > 0 else -math.inf)
    return F32(s)


def _fma_arrays(a, b, c):
    with np.errstate(all="ignore"):
        p = a.astype(np.float64) * b.astype(np.float64)
        c = c.astype(np.float64)
        s = np.atleast_1d(p + c)
        z = s - p
        error = (p - (s - z)) + (c - z)
        fix = np.isfinite(s) & (error != 0) & (s.view(np.uint64) & 1 == 0)
        odd = np.where(fix, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
        return odd.astype(F32).reshape(np.shape(p + c))


def max_f32(a, b):
    """The larger of a and b. If one is NaN, the other. +0 is larger than -0."""
    a, b = f32(a), f32(b)
    if a != a:
        return b if b == b else _NAN
    if b != b or a > b:
        return a
    return b if a < b or math.copysign(1, a) < 0 else a


def min_f32(a, b):
    """The smaller of a and b. If one is NaN, the other. -0 is smaller than +0."""
    a, b = f32(a), f32(b)
    if a != a:
        return b if b == b else _NAN
    if b != b or a < b:
        return a
    return b if a > b or math.copysign(1, b) < 0 else a


def abs_f32(a):
    """a without its sign."""
    return abs(f32(a))


def exp(a):
    """e to the power a, within 2 units in the last place. Not bit-exact."""
    return F32(np.exp(F32(a)))


def ex2_approx(a):
    """2 to the power a, as ex2.approx.f32 (within 2 units in the last place)."""
    return F32(np.exp2(F32(a)))


def popc(x):
    """Number of set bits of a u32."""
    return bin(x & MASK32).count("1")


def ffs(x):
    """Position of the lowest set bit of a u32, counted from 1; 0 if there is none."""
    x &= MASK32
    return (x & -x).bit_length()


def clz(x):
    """Number of zero bits above the highest set bit of a u32."""
    return 32 - (x & MASK32).bit_length()
