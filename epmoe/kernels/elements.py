"""Numbers of combine: 16 bytes of the output type as float32 values, and back with one rounding."""

from typing import NamedTuple

from epmoe.device import (add_rn, bf16_hi, bf16_lo, device_fn, f16_hi, f16_lo, f32, f32_as_u32, fma_rn, i32,
                          pack_bf16x2, pack_f16x2, u32_as_f32)

# combine_dtype -> (low half, high half, pack) of a 32-bit word that holds two numbers
PAIRS = {"bf16": (bf16_lo, bf16_hi, pack_bf16x2), "fp16": (f16_lo, f16_hi, pack_f16x2)}


class Elements(NamedTuple):
    """Device functions over one vector of 16 bytes; `values` are tuples of n float32, vectors tuples of 4 u32.

    zeros() -> values. unpack(vector) -> values. pack(values) -> vector, each rounded once, to nearest even.
    accumulate(w, vector, sums) -> values: fma(w, x, sum), each rounded once.
    add(values, vector) -> values: each plus the vector's, rounded once.
    each(fn): a device function (token, col, values, words) -> values, which are fn((token, col + j, value j), words).
    """

    n: int
    zeros: callable
    unpack: callable
    pack: callable
    accumulate: callable
    add: callable
    each: callable


@device_fn
def _zeros_4():
    return f32(0), f32(0), f32(0), f32(0)


@device_fn
def _fma_4(w, x, s):
    return fma_rn(w, x[0], s[0]), fma_rn(w, x[1], s[1]), fma_rn(w, x[2], s[2]), fma_rn(w, x[3], s[3])


@device_fn
def _add_4(v, x):
    return add_rn(v[0], x[0]), add_rn(v[1], x[1]), add_rn(v[2], x[2]), add_rn(v[3], x[3])


def _each_of_4(fn):
    @device_fn
    def apply(token, col, v, words):
        return (fn((token, col, v[0]), words), fn((token, i32(col + 1), v[1]), words),
                fn((token, i32(col + 2), v[2]), words), fn((token, i32(col + 3), v[3]), words))

    return apply


def make(dtype: str) -> Elements:
    """The functions for combine_dtype "bf16", "fp16" or "fp32"."""
    return _single() if dtype == "fp32" else _pairs(*PAIRS[dtype])


def _pairs(low, high, pair):
    @device_fn
    def unpack(q):
        return low(q[0]), high(q[0]), low(q[1]), high(q[1]), low(q[2]), high(q[2]), low(q[3]), high(q[3])

    @device_fn
    def pack(v):
        return pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])

    @device_fn
    def accumulate(w, q, s):
        x = unpack(q)
        return _fma_4(w, x[:4], s[:4]) + _fma_4(w, x[4:], s[4:])

    @device_fn
    def add(v, q):
        x = unpack(q)
        return _add_4(v[:4], x[:4]) + _add_4(v[4:], x[4:])

    def each(fn):
        four = _each_of_4(fn)
        return device_fn(lambda token, col, v, words: four(token, col, v[:4], words)
                         + four(token, i32(col + 4), v[4:], words))

    return Elements(8, device_fn(lambda: _zeros_4() + _zeros_4()), unpack, pack, accumulate, add, each)


def _single():
    @device_fn
    def unpack(q):
        return u32_as_f32(q[0]), u32_as_f32(q[1]), u32_as_f32(q[2]), u32_as_f32(q[3])

    @device_fn
    def pack(v):
        return f32_as_u32(v[0]), f32_as_u32(v[1]), f32_as_u32(v[2]), f32_as_u32(v[3])

    accumulate, add = device_fn(lambda w, q, s: _fma_4(w, unpack(q), s)), device_fn(lambda v, q: _add_4(v, unpack(q)))
    return Elements(4, _zeros_4, unpack, pack, accumulate, add, _each_of_4)
