"""Cases of casts, conversions, arithmetic and bits: out[i] = op(a[i], ...), one thread for each i."""

from fractions import Fraction

import ml_dtypes
import numpy as np
from case_table import DTYPE, OUT, at_types, case, intrinsic

from epmoe.device import device_fn, kernel, load_f32, store_f32, thread_idx, u64


def unary(op, load, store, in_size, out_size):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        if i < num_tokens:
            store(params + u64(OUT) + u64(out_size * i), op(load(params + u64(in_size * i))))

    return apply


def binary(op, store):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        if i < num_tokens:
            a, b = load_f32(params + u64(4 * i)), load_f32(params + u64(4 * (num_tokens + i)))
            store(params + u64(OUT) + u64(4 * i), op(a, b))

    return apply


def ternary(op):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        if i < num_tokens:
            a, b = load_f32(params + u64(4 * i)), load_f32(params + u64(4 * (num_tokens + i)))
            store_f32(params + u64(OUT) + u64(4 * i), op(a, b, load_f32(params + u64(4 * (2 * num_tokens + i)))))

    return apply


def number(name, ptx, ty_in, ty_out, inputs, expected, second=None, **more):
    """second: an operand that is the same for all threads."""
    load, store = at_types(ty_in)[0], at_types(ty_out)[1]
    inputs = np.asarray(inputs, DTYPE[ty_in])
    op = intrinsic(name)
    applied = op if second is None else device_fn(lambda a: op(a, second))
    made = unary(applied, load, store, inputs.itemsize, DTYPE[ty_out]().itemsize)
    case(name, ptx, made, inputs, np.asarray(expected, DTYPE[ty_out]), block=len(inputs), **more)


def number2(name, ptx, ty_out, a, b, expected):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    made = binary(intrinsic(name), at_types(ty_out)[1])
    case(name, ptx, made, np.concatenate([a, b]), np.asarray(expected, DTYPE[ty_out]), block=len(a))


SMALL = [0, 1, 5, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF]
INTEGERS = [*SMALL, 0x100000000, 0x123456789ABCDEF0, 0xFFFFFFFFFFFFFFFF]
LOW, SIGNED = [x & 0xFFFFFFFF for x in INTEGERS], [0, 5, -1, -(2**31)]
number("u32", r"cvt\.u32\.u64|st\.global\.u32", "u64", "u32", INTEGERS, LOW)
number("i32", r"st\.global\.s32", "u64", "i32", INTEGERS, np.uint32(LOW).view(np.int32))
number("u64", r"cvt\.s64\.s32|cvt\.u64\.u32", "i32", "u64", SIGNED, [x % 2**64 for x in SIGNED])
_ints, _rounded = [0, 5, -1, 16777217, 16777219, 2**31 - 1], [0, 5, -1, 16777216, 16777220, 2**31]
number("f32", r"cvt\.rn\.f32\.s32", "i32", "f32", _ints, _rounded)
BITS = np.array([0, 0x80000000, 0x3F800000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x4049_0FDB], np.uint32)
number("u32_as_f32", r"mov\.b32 %f\d+, %r\d+", "u32", "f32", BITS, BITS.view(np.float32))
number("f32_as_u32", r"mov\.b32 %r\d+, %f\d+", "f32", "u32", BITS.view(np.float32), BITS)
PAIRS = np.array([0x3F80C000, 0x00018001, 0x7F80FF80, 0x12345678, 0x0001FFFF], np.uint32)
number("bf16_lo", r"shl\.b32 t, %r\d+, 16", "u32", "f32", PAIRS, (PAIRS << 16).view(np.float32))
_high = (PAIRS & np.uint32(0xFFFF0000)).view(np.float32)
number("bf16_hi", r"and\.b32 t, %r\d+, 0xffff0000", "u32", "f32", PAIRS, _high)
HALF_PAIRS = np.array([0x3C00C000, 0x00018001, 0x7C00FC00, 0x12345678, 0x0001FFFF, 0x03FF0400], np.uint32)
for _half, _shift in (("lo", 0), ("hi", 16)):
    _values = (HALF_PAIRS >> _shift).astype(np.uint16).view(np.float16).astype(np.float32)
    number("f16_" + _half, r"cvt\.f32\.f16 %f\d+, " + _half[0], "u32", "f32", HALF_PAIRS, _values)
CODES = np.arange(0, 256, 2, dtype=np.uint32) | np.arange(1, 256, 2, dtype=np.uint32) << 8
for _half, _shift in (("lo", 0), ("hi", 8)):
    _values = (CODES >> _shift).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    number("e4m3_" + _half, r"cvt\.rn\.f16x2\.e4m3x2", "u32", "f32", CODES, _values)

# operands of one, two and three
A, B, C = np.array(
    [
        (1.0, 3.0, -3.0),
        (-0.0, 0.0, -0.0),
        (1e-45, 0.5, 1e-45),
        (3.4e38, 3.4e38, -np.inf),
        (-3.4e38, 3.4e38, 3.4e38),
        (np.inf, -np.inf, 1.0),
        (-np.inf, 2.0, 1.0),
        (np.nan, 1.0, 1.0),
        (1.00390625, 1.0000001, -1.0039063),
        (1.01171875, -1.0, 1e-9),
        (65519.0, np.nan, 1.0),
        (65520.0, 1e-3, 65520.0),
        (448.0, 7.0, -3136.0),
        (464.0, 0.3, 1e-30),
        (465.0, -0.0, 465.0),
        (-1e9, 1e9, 1e-3),
        (2**-9, 1.5, 1e-7),
        (2**-10, -1.5, 2**-11),
        (3 * 2**-10, 0.1, -3e-4),
        (0.1, 0.2, -0.02),
        (1 / 3, 3.0, -1.0),
        (17.0, 1e-7, 1e-8),
        (5.9604645e-08, 2.0, 1e-14),
        (1.1754944e-38, 0.5, -1e-45),
    ],
    np.float32,
).T.copy()


def bf16_bits(x):
    bits = x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, bits).astype(np.uint32)


def f16_bits(x):
    return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32)


def e4m3_bits(x):
    clipped = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, clipped).astype(np.uint32)


def exactly_rounded(a, b, c):
    """a * b + c with rational numbers, rounded to float32 once."""
    if not np.isfinite([a, b, c]).all() or float(a) * float(b) + float(c) == 0:
        return np.float32(float(a) * float(b) + float(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = np.float32(float(exact))
    if not np.isfinite(guess):
        return guess
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(
        (x for x in near if np.isfinite(x)),
        key=lambda x: (abs(Fraction(float(x)) - exact), int(np.float32(x).view(np.uint32)) & 1),
    )


with np.errstate(all="ignore"):
    number2("pack_bf16x2", r"cvt\.rn\.bf16x2\.f32", "u32", A, B, bf16_bits(A) | bf16_bits(B) << 16)
    number2("pack_f16x2", r"cvt\.rn\.f16x2\.f32", "u32", A, B, f16_bits(A) | f16_bits(B) << 16)
    _codes = e4m3_bits(A) | e4m3_bits(B) << 8
    number2("pack_e4m3x2", r"cvt\.rn\.satfinite\.e4m3x2\.f32", "u32", A, B, _codes)
    number2("mul_rn", r"mul\.rn\.f32 ", "f32", A, B, A * B)
    number2("add_rn", r"add\.rn\.f32 ", "f32", A, B, A + B)
    number2("sub_rn", r"sub\.rn\.f32 ", "f32", A, B, A - B)
    number2("div_rn", r"div\.rn\.f32 ", "f32", A, B, A / B)
    _made, _exact = ternary(intrinsic("fma_rn")), np.array([*map(exactly_rounded, A, B, C)], np.float32)
    case("fma_rn", r"fma\.rn\.f32 ", _made, np.concatenate([A, B, C]), _exact, block=len(A))
    _max, _min = np.fmax(A, B), np.fmin(A, B)
    _max[1], _min[1] = 0.0, -0.0  # max.f32(-0, +0): NumPy may give either zero
    number2("max_f32", r"max\.f32 ", "f32", A, B, _max)
    number2("min_f32", r"min\.f32 ", "f32", A, B, _min)
    number("abs_f32", r"abs\.f32 ", "f32", "f32", A, np.abs(A))
    _x = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 10.0, -10.0, 80.0, -80.0, 1e-8, 3.3, -7.7], np.float32)
    for _name, _text, _power in (("exp", r"ex2\.approx", np.exp), ("ex2_approx", r"ex2\.approx\.f32 ", np.exp2)):
        _exact = _power(_x.astype(np.float64)).astype(np.float32)
        number(_name, _text, "f32", "f32", _x, _exact, close=True)
MASKS = [0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x00F0, 0x7FFFFFFF]
number("popc", r"popc\.b32", "u32", "i32", MASKS, [bin(x).count("1") for x in MASKS])
number("ffs", r"brev\.b32", "u32", "i32", MASKS, [(x & -x).bit_length() for x in MASKS])
number("clz", r"clz\.b32", "u32", "i32", MASKS, [32 - x.bit_length() for x in MASKS])
