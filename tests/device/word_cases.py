"""One table for all words of the device layer: a small kernel for each, what it must leave in memory, and its PTX.

A kernel finds its inputs at `params` and writes its results at `params + OUT`. Expected values come from Python integers
and from NumPy and ml_dtypes, not from the device layer.
"""
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

from epmoe import device
from epmoe.device import (block_dim, block_idx, kernel, load_f32, load_i32, load_u32, shared_addr, shared_array,
                          store16, store_f32, store_i32, store_u32, syncthreads, thread_idx, u32, u64)
from epmoe.device import int32 as shared_int32
from epmoe.device import names

OUT = 4096
DTYPE = {"u8": np.uint8, "u16": np.uint16, "i32": np.int32, "u32": np.uint32, "u64": np.uint64, "f32": np.float32}
PTX = {"u8": "u8", "u16": "u16", "i32": "s32", "u32": "u32", "u64": "u64", "f32": "f32"}
SCOPES = ("cta", "gpu", "sys")


@dataclass
class Case:
    """A kernel and what it must leave at OUT (and, if `left` is given, at the inputs)."""

    word: str
    ptx: str
    kernel: object
    inputs: np.ndarray
    expected: np.ndarray
    left: np.ndarray = None
    grid: int = 1
    block: int = 32
    shared_bytes: int = 0
    close: bool = False             # approximate words: two units in the last place


def word(name):
    return getattr(device, name)


def at_types(ty):
    return word("load_" + ty), word("store_" + ty)


CASES = {}


def case(name, ptx, made, inputs, expected, **more):
    assert name not in CASES, name
    CASES[name] = Case(name, ptx, made, np.asarray(inputs), np.asarray(expected), **more)


# ---------------------------------------------------------------- plain accesses
def reads_one(op, store):
    @kernel()
    def reads(params, num_tokens, my_rank):
        if thread_idx() == 0:
            store(params + u64(OUT), op(params + u64(8)))
    return reads


def writes_one(op, load):
    @kernel()
    def writes(params, num_tokens, my_rank):
        if thread_idx() == 0:
            op(params + u64(OUT), load(params + u64(8)))
    return writes


def reads_16(op):
    @kernel()
    def reads(params, num_tokens, my_rank):
        if thread_idx() == 0:
            q = op(params + u64(16))
            store16(params + u64(OUT), q[0], q[1], q[2], q[3])
    return reads


def writes_16(op):
    @kernel()
    def writes(params, num_tokens, my_rank):
        if thread_idx() == 0:
            op(params + u64(OUT), load_u32(params), load_u32(params + u64(4)), load_u32(params + u64(8)), load_u32(params + u64(12)))
    return writes


SAMPLE = {"u8": [7, 0xFE], "u16": [7, 0xFFFE], "i32": [5, -123456789], "u32": [5, 0xFEDCBA98], "u64": [5, 0xFEDCBA9876543210],
          "f32": [1.5, -3.25e-41]}
WIDE = {"u8": "u32", "u16": "u32"}
for _ty in DTYPE:
    _load, _store = at_types(WIDE.get(_ty, _ty))
    _in = np.zeros(64 // DTYPE[_ty]().itemsize, DTYPE[_ty])
    _in[8 // _in.itemsize] = SAMPLE[_ty][1]
    case("load_" + _ty, r"ld\.global\.%s " % PTX[_ty], reads_one(word("load_" + _ty), _store), _in,
         np.array([SAMPLE[_ty][1]], DTYPE[WIDE.get(_ty, _ty)]))
    case("store_" + _ty, r"st\.global\.%s " % PTX[_ty], writes_one(word("store_" + _ty), at_types(_ty)[0]), _in,
         np.array([SAMPLE[_ty][1]], DTYPE[_ty]))
FOUR = np.array([1, 0x80000000, 0xFFFFFFFF, 0x12345678], np.uint32)
for _name, _text in {"load16": r"ld\.global\.v4\.u32", "load16_nc": r"ld\.global\.nc\.L1::no_allocate\.L2::256B\.v4\.u32",
                     "load16_stream": r"ld\.global\.L1::no_allocate\.v4\.u32"}.items():
    case(_name, _text, reads_16(word(_name)), np.concatenate([np.zeros(4, np.uint32), FOUR]), FOUR)
for _name, _text in {"store16": r"st\.global\.v4\.u32", "store16_stream": r"st\.global\.L1::no_allocate\.v4\.u32"}.items():
    case(_name, _text, writes_16(word(_name)), FOUR, FOUR)


# ---------------------------------------------------------------- strong accesses and atomics
def changes_one(op, load, store):
    @kernel()
    def changes(params, num_tokens, my_rank):
        if thread_idx() == 0:
            store(params + u64(OUT), op(params, load(params + u64(8))))
    return changes


def adds_one(op, load, store):
    @kernel()
    def adds(params, num_tokens, my_rank):
        if thread_idx() == 0:
            op(params, load(params + u64(8)))
            store(params + u64(OUT), load(params))
    return adds


def swaps_twice(op, load, store):
    @kernel()
    def swaps(params, num_tokens, my_rank):
        if thread_idx() == 0:
            store(params + u64(OUT), op(params, load(params + u64(8)), load(params + u64(16))))         # not expected: stays
            store(params + u64(OUT + 8), op(params, load(params + u64(24)), load(params + u64(16))))    # expected: changes
    return swaps


def words_of(ty, *values):
    """Values of a type, one in each 8 bytes."""
    dtype = DTYPE[ty]
    out = np.zeros(len(values) * (8 // dtype().itemsize), dtype)
    out[::8 // dtype().itemsize] = np.array(values, dtype)
    return out


FIRST = {"i32": -7, "u32": 0xFFFFFFF0, "u64": 0xFFFFFFFFFFFFFFF0}
SECOND = {"i32": 40, "u32": 0x20, "u64": 0x20}
for _ty in ("i32", "u32", "u64"):
    _load, _store = at_types(_ty)
    _dtype = DTYPE[_ty]
    _a, _b = FIRST[_ty], SECOND[_ty]
    with np.errstate(over="ignore"):
        _sum = _dtype(_a) + _dtype(_b)
    for _scope in SCOPES:
        for _order in ("relaxed", "acquire"):
            _name = "ld_%s_%s_%s" % (_order, _scope, _ty)
            case(_name, r"ld\.%s\.%s\.global\.%s " % (_order, _scope, PTX[_ty]), reads_one(word(_name), _store), words_of(_ty, _b, _a),
                 np.array([_a], _dtype))
        for _order in ("relaxed", "release"):
            _name = "st_%s_%s_%s" % (_order, _scope, _ty)
            case(_name, r"st\.%s\.%s\.global\.%s " % (_order, _scope, PTX[_ty]), writes_one(word(_name), _load), words_of(_ty, _b, _a),
                 np.array([_a], _dtype))
            _name = "red_add_%s_%s_%s" % (_order, _scope, _ty)
            case(_name, r"red\.%s\.%s\.global\.add\.%s " % (_order, _scope, PTX[_ty]), adds_one(word(_name), _load, _store),
                 words_of(_ty, _a, _b), np.array([_sum], _dtype))
        for _order in ("relaxed", "acquire", "release", "acq_rel"):
            _name = "atomic_add_%s_%s_%s" % (_order, _scope, _ty)
            case(_name, r"atom\.%s\.%s\.global\.add\.%s " % (_order, _scope, PTX[_ty]), changes_one(word(_name), _load, _store),
                 words_of(_ty, _a, _b), np.array([_a], _dtype), left=words_of(_ty, _sum, _b))
    for _scope in ("gpu", "sys"):
        _name = "atomic_max_relaxed_%s_%s" % (_scope, _ty)
        case(_name, r"atom\.relaxed\.%s\.global\.max\.%s " % (_scope, PTX[_ty]), changes_one(word(_name), _load, _store),
             words_of(_ty, _a, _b), np.array([_a], _dtype), left=words_of(_ty, max(_a, _b), _b))
for _scope in ("gpu", "sys"):
    case("atomic_or_relaxed_%s_u32" % _scope, r"atom\.relaxed\.%s\.global\.or\.b32 " % _scope,
         changes_one(word("atomic_or_relaxed_%s_u32" % _scope), load_u32, store_u32), words_of("u32", 0x80000001, 0x11),
         np.array([0x80000001], np.uint32), left=words_of("u32", 0x80000011, 0x11))
    for _order in ("relaxed", "acq_rel"):
        for _ty, _bits in (("i32", "b32"), ("u64", "b64")):
            _load, _store = at_types(_ty)
            _name = "atomic_cas_%s_%s_%s" % (_order, _scope, _ty)
            _a = FIRST[_ty]
            case(_name, r"atom\.%s\.%s\.global\.cas\.%s " % (_order, _scope, _bits), swaps_twice(word(_name), _load, _store),
                 words_of(_ty, _a, 3, 9, _a), words_of(_ty, _a, _a), left=words_of(_ty, 9, 3, 9, _a))


def fences(op):
    @kernel()
    def fence(params, num_tokens, my_rank):
        store_i32(params + u64(OUT) + u64(4 * thread_idx()), thread_idx())
        op()
        store_i32(params + u64(OUT) + u64(4 * thread_idx()), load_i32(params + u64(OUT) + u64(4 * thread_idx())) + 1)
    return fence


for _scope in SCOPES:
    case("fence_acq_rel_" + _scope, r"fence\.acq_rel\.%s;" % _scope, fences(word("fence_acq_rel_" + _scope)), np.zeros(1, np.int32),
         np.arange(1, 33, dtype=np.int32))
case("syncwarp", r"bar\.warp\.sync", fences(word("syncwarp")), np.zeros(1, np.int32), np.arange(1, 33, dtype=np.int32))
case("syncthreads", r"bar\.sync", fences(word("syncthreads")), np.zeros(1, np.int32), np.arange(1, 33, dtype=np.int32))
for _name, _text in {"griddep_wait": r"griddepcontrol\.wait", "griddep_launch": r"griddepcontrol\.launch_dependents",
                     "fence_proxy_async": r"fence\.proxy\.async;"}.items():
    case(_name, _text, fences(word(_name)), np.zeros(1, np.int32), np.arange(1, 33, dtype=np.int32))


# ---------------------------------------------------------------- ids and time
def tells_id(op):
    @kernel()
    def tells(params, num_tokens, my_rank):
        store_i32(params + u64(OUT) + u64(4 * (thread_idx() + block_idx() * block_dim())), op())
    return tells


_thread = np.tile(np.arange(80), 3)
for _name, _text, _expected in (
        ("thread_idx", r"%tid\.x", _thread), ("block_idx", r"%ctaid\.x", np.repeat(np.arange(3), 80)),
        ("block_dim", r"%ntid\.x", np.full(240, 80)), ("grid_dim", r"%nctaid\.x", np.full(240, 3)),
        ("lane_id", r"%laneid", _thread % 32), ("warp_id", r"mov\.u32 t, %tid\.x; shr\.u32", _thread // 32),
        ("n_warps", r"mov\.u32 t, %ntid\.x; add\.u32 t, t, 31", np.full(240, 3))):
    case(_name, _text, tells_id(word(_name)), np.zeros(1, np.int32), _expected.astype(np.int32), grid=3, block=80)


def advances(op):
    @kernel()
    def clock_advances(params, num_tokens, my_rank):
        if thread_idx() == 0:
            start = op()
            for _ in range(1000):
                store_i32(params, 1)
            device_nanosleep(u32(100000))
            store_i32(params + u64(OUT), 1 if u64(op()) > u64(start) else 0)
    return clock_advances


device_nanosleep = word("nanosleep")
for _name, _text in {"globaltimer": r"%globaltimer", "clock": r"%clock64"}.items():
    case(_name, _text, advances(word(_name)), np.zeros(1, np.int32), np.ones(1, np.int32))


@kernel()
def sleeps(params, num_tokens, my_rank):
    if thread_idx() == 0:
        start = word_globaltimer()
        for _ in range(100):
            device_nanosleep(u32(10000))
        store_i32(params + u64(OUT), 1 if u64(word_globaltimer()) - u64(start) > u64(200000) else 0)


word_globaltimer = word("globaltimer")
case("nanosleep", r"nanosleep\.u32", sleeps, np.zeros(1, np.int32), np.ones(1, np.int32))


# ---------------------------------------------------------------- numbers: out[i] = op(a[i], ...), one thread for each i
def unary(op, load, store, in_size, out_size):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        if i < num_tokens:
            store(params + u64(OUT) + u64(out_size * i), op(load(params + u64(in_size * i))))
    return apply


def binary(op, load, store, size):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        if i < num_tokens:
            store(params + u64(OUT) + u64(4 * i), op(load(params + u64(size * i)), load(params + u64(size * (num_tokens + i)))))
    return apply


def ternary(op):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        if i < num_tokens:
            a, b = load_f32(params + u64(4 * i)), load_f32(params + u64(4 * (num_tokens + i)))
            store_f32(params + u64(OUT) + u64(4 * i), op(a, b, load_f32(params + u64(4 * (2 * num_tokens + i)))))
    return apply


def number(name, ptx, ty_in, ty_out, inputs, expected, **more):
    load, store = at_types(ty_in)[0], at_types(ty_out)[1]
    inputs = np.asarray(inputs, DTYPE[ty_in])
    made = unary(word(name), load, store, inputs.itemsize, DTYPE[ty_out]().itemsize)
    case(name, ptx, made, inputs, np.asarray(expected, DTYPE[ty_out]), block=len(inputs), **more)


def number2(name, ptx, ty_out, a, b, expected):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    case(name, ptx, binary(word(name), load_f32, at_types(ty_out)[1], 4), np.concatenate([a, b]),
         np.asarray(expected, DTYPE[ty_out]), block=len(a))


INTEGERS = [0, 1, 5, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x100000000, 0x123456789ABCDEF0, 0xFFFFFFFFFFFFFFFF]
number("u32", r"cvt\.u32\.u64|st\.global\.u32", "u64", "u32", INTEGERS, [x & 0xFFFFFFFF for x in INTEGERS])
number("i32", r"st\.global\.s32", "u64", "i32", INTEGERS, [(x + 2**31 & 0xFFFFFFFF) - 2**31 for x in INTEGERS])
number("u64", r"cvt\.s64\.s32|cvt\.u64\.u32", "i32", "u64", [0, 5, -1, -2**31], [x & 2**64 - 1 for x in (0, 5, -1, -2**31)])
number("f32", r"cvt\.rn\.f32\.s32", "i32", "f32", [0, 5, -1, 16777217, 16777219, 2**31 - 1],
       [0, 5, -1, 16777216, 16777220, 2**31])
BITS = np.array([0, 0x80000000, 0x3F800000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x4049_0FDB], np.uint32)
number("u32_as_f32", r"mov\.b32 %f\d+, %r\d+", "u32", "f32", BITS, BITS.view(np.float32))
number("f32_as_u32", r"mov\.b32 %r\d+, %f\d+", "f32", "u32", BITS.view(np.float32), BITS)
PAIRS = np.array([0x3F80C000, 0x00018001, 0x7F80FF80, 0x12345678, 0x0001FFFF], np.uint32)
number("bf16_lo", r"shl\.b32 t, %r\d+, 16", "u32", "f32", PAIRS, (PAIRS << 16).view(np.float32))
number("bf16_hi", r"and\.b32 t, %r\d+, 0xffff0000", "u32", "f32", PAIRS, (PAIRS & np.uint32(0xFFFF0000)).view(np.float32))
HALF_PAIRS = np.array([0x3C00C000, 0x00018001, 0x7C00FC00, 0x12345678, 0x0001FFFF, 0x03FF0400], np.uint32)
number("f16_lo", r"cvt\.f32\.f16 %f\d+, l", "u32", "f32", HALF_PAIRS, HALF_PAIRS.astype(np.uint16).view(np.float16).astype(np.float32))
number("f16_hi", r"cvt\.f32\.f16 %f\d+, h", "u32", "f32", HALF_PAIRS,
       (HALF_PAIRS >> 16).astype(np.uint16).view(np.float16).astype(np.float32))
CODES = np.arange(0, 256, 2, dtype=np.uint32) | np.arange(1, 256, 2, dtype=np.uint32) << 8
number("e4m3_lo", r"cvt\.rn\.f16x2\.e4m3x2", "u32", "f32", CODES,
       CODES.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
number("e4m3_hi", r"cvt\.rn\.f16x2\.e4m3x2", "u32", "f32", CODES,
       (CODES >> 8).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))

A = np.array([1.0, -0.0, 1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, 65519.0, 65520.0, 448.0, 464.0, 465.0,
              -1e9, 2**-9, 2**-10, 3 * 2**-10, 0.1, 1 / 3, 17.0, 5.9604645e-08, 1.1754944e-38], np.float32)
B = np.array([3.0, 0.0, 0.5, 3.4e38, 3.4e38, -np.inf, 2.0, 1.0, 1.0000001, -1.0, np.nan, 1e-3, 7.0, 0.3, -0.0, 1e9, 1.5, -1.5, 0.1, 0.2,
              3.0, 1e-7, 2.0, 0.5], np.float32)
C = np.array([-3.0, -0.0, 1e-45, -np.inf, 3.4e38, 1.0, 1.0, 1.0, -1.0039063, 1e-9, 1.0, 65520.0, -3136.0, 1e-30, 465.0, 1e-3, 1e-7, 2**-11,
              -3e-4, -0.02, -1.0, 1e-8, 1e-14, -1e-45], np.float32)


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
    return min((x for x in near if np.isfinite(x)),
               key=lambda x: (abs(Fraction(float(x)) - exact), int(np.float32(x).view(np.uint32)) & 1))


with np.errstate(all="ignore"):
    number2("pack_bf16x2", r"cvt\.rn\.bf16x2\.f32", "u32", A, B, bf16_bits(A) | bf16_bits(B) << 16)
    number2("pack_f16x2", r"cvt\.rn\.f16x2\.f32", "u32", A, B, f16_bits(A) | f16_bits(B) << 16)
    number2("pack_e4m3x2", r"cvt\.rn\.satfinite\.e4m3x2\.f32", "u32", A, B, e4m3_bits(A) | e4m3_bits(B) << 8)
    number2("mul_rn", r"mul\.rn\.f32 ", "f32", A, B, A * B)
    number2("add_rn", r"add\.rn\.f32 ", "f32", A, B, A + B)
    number2("sub_rn", r"sub\.rn\.f32 ", "f32", A, B, A - B)
    number2("div_rn", r"div\.rn\.f32 ", "f32", A, B, A / B)
    case("fma_rn", r"fma\.rn\.f32 ", ternary(word("fma_rn")), np.concatenate([A, B, C]),
         np.array([exactly_rounded(a, b, c) for a, b, c in zip(A, B, C)], np.float32), block=len(A))
    _max, _min = np.fmax(A, B), np.fmin(A, B)
    _max[1], _min[1] = 0.0, -0.0                                # max.f32(-0, +0): NumPy may give either zero
    number2("max_f32", r"max\.f32 ", "f32", A, B, _max)
    number2("min_f32", r"min\.f32 ", "f32", A, B, _min)
    number("abs_f32", r"abs\.f32 ", "f32", "f32", A, np.abs(A))
    _x = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 10.0, -10.0, 80.0, -80.0, 1e-8, 3.3, -7.7], np.float32)
    number("exp", r"ex2\.approx", "f32", "f32", _x, np.exp(_x.astype(np.float64)).astype(np.float32), close=True)
    number("ex2_approx", r"ex2\.approx\.f32 ", "f32", "f32", _x, np.exp2(_x.astype(np.float64)).astype(np.float32), close=True)
MASKS = [0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x00F0, 0x7FFFFFFF]
number("popc", r"popc\.b32", "u32", "i32", MASKS, [x.bit_count() if hasattr(x, "bit_count") else bin(x).count("1") for x in MASKS])
number("ffs", r"brev\.b32", "u32", "i32", MASKS, [(x & -x).bit_length() for x in MASKS])
number("clz", r"clz\.b32", "u32", "i32", MASKS, [32 - x.bit_length() for x in MASKS])


# ---------------------------------------------------------------- warp operations, in two warps and a partial one
def by_lane(op, load, store, size):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        store(params + u64(OUT) + u64(size * i), op(load(params + u64(size * i))))
    return apply


def by_lane2(op, load, store, size, other):
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        store(params + u64(OUT) + u64(size * i), op(load(params + u64(size * i)), other))
    return apply


def shuffles_all(op, other):
    """i32, u32 and f32 in one kernel, since a shuffle takes all three."""
    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        store_i32(params + u64(OUT) + u64(4 * i), op(load_i32(params + u64(4 * i)), other))
        store_u32(params + u64(OUT + 256) + u64(4 * i), op(load_u32(params + u64(4 * i)), other))
        store_f32(params + u64(OUT + 512) + u64(4 * i), op(load_f32(params + u64(4 * i)), other))
    return apply


VALUES = (np.arange(64) * 37 % 64 * 1000003 - 20000000).astype(np.int32)
LANE, BASE = np.arange(64) % 32, np.arange(64) // 32 * 32
for _name, _text, _other, _source in (
        ("shfl_idx", r"shfl\.sync\.idx\.b32", 5, BASE + 5), ("shfl_xor", r"shfl\.sync\.bfly\.b32", 6, BASE + (LANE ^ 6)),
        ("shfl_up", r"shfl\.sync\.up\.b32", 3, np.where(LANE >= 3, BASE + LANE - 3, BASE + LANE)),
        ("shfl_down", r"shfl\.sync\.down\.b32", 3, np.where(LANE < 29, BASE + LANE + 3, BASE + LANE))):
    case(_name, _text, shuffles_all(word(_name), _other), VALUES, np.tile(VALUES[_source], 3), block=64)


def warp_case(name, ptx, ty_in, ty_out, inputs, expected, other=None):
    size = 8 if "u64" in (ty_in, ty_out) else 4
    load, store = at_types(ty_in)[0], at_types(ty_out)[1]
    made = by_lane(word(name), load, store, size) if other is None else by_lane2(word(name), load, store, size, other)
    case(name, ptx, made, np.asarray(inputs, DTYPE[ty_in]), np.asarray(expected, DTYPE[ty_out]), block=len(inputs))


ODD = (np.arange(64) * 7 // 3 % 2).astype(np.int32)
_ballots = [sum(int(ODD[w * 32 + i]) << i for i in range(32)) for w in (0, 1)]
warp_case("ballot", r"vote\.sync\.ballot\.b32", "i32", "u32", ODD, np.repeat(_ballots, 32))
KEYS = (np.arange(64) * np.arange(64) % 5 - 2).astype(np.int32)
warp_case("match_any", r"match\.any\.sync\.b32", "i32", "u32", KEYS,
          [sum(1 << j for j in range(32) if KEYS[i // 32 * 32 + j] == KEYS[i]) for i in range(64)])
_some = np.concatenate([np.arange(32) == 9, np.zeros(32)]).astype(np.int32)
warp_case("any_lane", r"vote\.sync\.any\.pred", "i32", "i32", _some, np.repeat([1, 0], 32))
warp_case("all_lanes", r"vote\.sync\.all\.pred", "i32", "i32", 1 - _some, np.repeat([0, 1], 32))
warp_case("warp_broadcast_i32", r"shfl\.sync\.idx\.b32", "i32", "i32", VALUES, np.repeat([VALUES[7], VALUES[39]], 32), 7)
LONG = VALUES.astype(np.int64).view(np.uint64) * np.uint64(0x100000001)
warp_case("warp_broadcast_u64", r"shfl\.sync\.idx\.b32 hi", "u64", "u64", LONG, np.repeat([LONG[31], LONG[63]], 32), 31)
warp_case("warp_sum_i32", r"redux\.sync\.add\.s32", "i32", "i32", VALUES, np.repeat(VALUES.reshape(2, 32).sum(1), 32))
warp_case("warp_inclusive_sum_i32", r"@p add\.s32 s, s, t", "i32", "i32", VALUES, VALUES.reshape(2, 32).cumsum(1).ravel())
_floats = (VALUES / np.float32(7)).astype(np.float32)
_floats[3], _floats[40] = np.nan, np.inf
warp_case("warp_max_f32", r"shfl\.sync\.bfly\.b32 t, m", "f32", "f32", _floats, np.repeat(np.nanmax(_floats.reshape(2, 32), 1), 32))


def votes(op):
    @kernel()
    def vote(params, num_tokens, my_rank):
        i = thread_idx()
        store_i32(params + u64(OUT) + u64(4 * i), op(load_i32(params + u64(4 * i))))
    return vote


case("syncthreads_or", r"bar\.red\.or\.pred", votes(word("syncthreads_or")), _some, np.ones(64, np.int32), block=64)
case("syncthreads_count", r"bar\.red\.popc\.u32", votes(word("syncthreads_count")), ODD, np.full(64, ODD.sum(), np.int32), block=64)


# ---------------------------------------------------------------- shared memory
@kernel()
def reverses(params, num_tokens, my_rank):
    a = shared_array(64, shared_int32)
    i = thread_idx()
    a[i] = load_i32(params + u64(4 * i))
    syncthreads()
    store_i32(params + u64(OUT) + u64(4 * i), a[63 - i])


case("shared_array", r"ld\.shared\.u32", reverses, VALUES, VALUES[::-1].copy(), block=64)


def counts_in_shared(op):
    @kernel()
    def counts(params, num_tokens, my_rank):
        a = shared_array(4, shared_int32)
        i = thread_idx()
        if i < 4:
            a[i] = 10
        syncthreads()
        op(a, i % 2 + 1, 1 + i % 2)
        syncthreads()
        if i < 4:
            store_i32(params + u64(OUT) + u64(4 * i), a[i])
    return counts


case("shared_add_i32", r"atom\.relaxed\.cta\.shared\.add\.s32", counts_in_shared(word("shared_add_i32")), np.zeros(1, np.int32),
     np.array([10, 42, 74, 10], np.int32), block=64)


def goes_through_shared(load, store, op_load, op_store, size):
    """Write with a word on a shared-window address, read with its counterpart, in reverse order."""
    @kernel()
    def through(params, num_tokens, my_rank):
        base = word_dynamic_shared()
        i = thread_idx()
        op_store(base + u32(size * i), load(params + u64(size * i)))
        syncthreads()
        store(params + u64(OUT) + u64(size * i), op_load(base + u32(size * (63 - i))))
    return through


word_dynamic_shared = word("dynamic_shared")
for _ty in ("i32", "u32", "u64", "f32"):
    _load, _store = at_types(_ty)
    _data = {"i32": VALUES, "u32": VALUES.view(np.uint32), "u64": LONG, "f32": _floats}[_ty]
    for _kind in ("load", "store"):
        case("shared_%s_%s" % (_kind, _ty), r"%s\.shared\.%s" % (_kind[0].replace("l", "ld").replace("s", "st"), PTX[_ty]),
             goes_through_shared(_load, _store, word("shared_load_" + _ty), word("shared_store_" + _ty), DTYPE[_ty]().itemsize), _data,
             _data[::-1].copy(), block=64, shared_bytes=1024)


def sixteen_through_shared(op_load, op_store):
    @kernel()
    def through(params, num_tokens, my_rank):
        base = word_dynamic_shared()
        i = thread_idx()
        p = params + u64(16 * i)
        op_store(base + u32(16 * i), load_u32(p), load_u32(p + u64(4)), load_u32(p + u64(8)), load_u32(p + u64(12)))
        syncthreads()
        q = op_load(base + u32(16 * (15 - i)))
        store16(params + u64(OUT) + u64(16 * i), q[0], q[1], q[2], q[3])
    return through


for _kind in ("load", "store"):
    case("shared_%s16" % _kind, r"%s\.shared\.v4\.u32" % {"load": "ld", "store": "st"}[_kind],
         sixteen_through_shared(word("shared_load16"), word("shared_store16")), VALUES, VALUES.reshape(16, 4)[::-1].copy(), block=16,
         shared_bytes=256)


@kernel()
def tells_addresses(params, num_tokens, my_rank):
    a, b = shared_array(8, shared_int32), shared_array(8, shared_int32)
    if thread_idx() == 0:
        a[3] = 7
        b[3] = 9
        store_i32(params + u64(OUT), word_shared_load(shared_addr(a) + u32(12)))
        store_i32(params + u64(OUT + 4), word_shared_load(shared_addr(b) + u32(12)))


word_shared_load = word("shared_load_i32")
case("shared_addr", r"cvta\.to\.shared\.u64", tells_addresses, np.zeros(1, np.int32), np.array([7, 9], np.int32))


@kernel()
def tells_dynamic(params, num_tokens, my_rank):
    a = shared_array(8, shared_int32)
    base = word_dynamic_shared()
    i = thread_idx()
    if i < 8:
        a[i] = 1
    word_shared_store(base + u32(4 * i), i)
    syncthreads()
    store_i32(params + u64(OUT) + u64(4 * i), word_shared_load(base + u32(4 * i)) + (1 if base % u32(128) == u32(0) else 0))


word_shared_store = word("shared_store_i32")
case("dynamic_shared", r"\.extern \.shared \.align 128", tells_dynamic, np.zeros(1, np.int32), np.arange(1, 33, dtype=np.int32),
     shared_bytes=128)

# ---------------------------------------------------------------- Hopper: one kernel that uses all of the bulk words
(w_init, w_expect, w_arrive, w_try, w_bulk_load, w_bulk_store, w_commit, w_wait, w_wait_read, w_fence, w_elect) = [
    word(n) for n in "mbar_init mbar_expect_tx mbar_arrive mbar_try_wait bulk_load bulk_store bulk_commit bulk_wait bulk_wait_read "
    "fence_proxy_async elect_one".split()]


@kernel()
def copies_in_bulk(params, num_tokens, my_rank):
    """Two phases: load 256 bytes, add 1 to each word, store them, with two arrivals a phase."""
    stage = word_dynamic_shared()
    bar = stage + u32(256)
    i = thread_idx()
    if i == 0:
        w_init(bar, u32(2))
        w_fence()
    syncthreads()
    for phase in range(2):
        if i == 0:
            w_expect(bar, u32(256))
            w_bulk_load(stage, params + u64(256 * phase), u32(256), bar)
        if i == 1:
            w_arrive(bar)
        while w_try(bar, u32(phase)) == 0:
            pass
        word_shared_store(stage + u32(4 * i), word_shared_load(stage + u32(4 * i)) + 1)
        w_fence()
        syncthreads()
        if i == 0:
            w_bulk_store(params + u64(OUT + 256 * phase), stage, u32(256))
            w_commit()
            w_wait_read()
        syncthreads()
    if i == 0:
        w_wait()


_bulk = np.arange(128, dtype=np.int32) * 3
for _name, _text in {
        "mbar_init": r"mbarrier\.init\.shared::cta\.b64", "mbar_expect_tx": r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64",
        "mbar_arrive": r"mbarrier\.arrive\.shared::cta\.b64", "mbar_try_wait": r"mbarrier\.try_wait\.parity\.shared::cta\.b64",
        "bulk_load": r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes",
        "bulk_store": r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", "bulk_commit": r"cp\.async\.bulk\.commit_group",
        "bulk_wait": r"cp\.async\.bulk\.wait_group 0", "bulk_wait_read": r"cp\.async\.bulk\.wait_group\.read 0"}.items():
    case(_name, _text, copies_in_bulk, _bulk, _bulk + 1, block=64, shared_bytes=512)


@kernel()
def elects(params, num_tokens, my_rank):
    chosen = w_elect()
    if chosen:
        store_i32(params + u64(OUT) + u64(4 * (thread_idx() // 32)), 1)
    how_many = device_popc(device_ballot(chosen))
    if thread_idx() % 32 == 0:
        store_i32(params + u64(OUT + 8) + u64(4 * (thread_idx() // 32)), how_many)


device_popc, device_ballot = word("popc"), word("ballot")
case("elect_one", r"elect\.sync", elects, np.zeros(1, np.int32), np.array([1, 1, 1, 1], np.int32), block=64)

assert set(CASES) == set(names.WORDS), set(CASES) ^ set(names.WORDS)
