"""Arithmetic of combine: 16 bytes of the output type as float32 values, and back with one rounding."""

from functools import cache

from epmoe.device import (add_rn, bf16_hi, bf16_lo, device_fn, f16_hi, f16_lo, f32, f32_as_u32, fma_rn, i32,
                          pack_bf16x2, pack_f16x2, u32_as_f32)

from .params import namespace, tuple_of

# combine_dtype -> (low half, high half, pack) of a 32-bit word that holds two numbers
PAIRS = {"bf16": (bf16_lo, bf16_hi, pack_bf16x2), "fp16": (f16_lo, f16_hi, pack_f16x2)}


@cache
def make(dtype: str):
    """Namespace "vectors" for combine_dtype "bf16", "fp16" or "fp32": device functions over one vector of 16 bytes.

    `values` are tuples of n float32, vectors tuples of 4 u32.
    zeros() -> values. unpack(vector) -> values. pack(values) -> vector, each rounded once, to nearest even.
    accumulate(w, vector, sums) -> values: fma(w, x, sum), each rounded once.
    add(values, vector) -> values: each plus the vector's, rounded once.
    each(fn): a device function (token, col, values, words) -> values, which are fn((token, col + j, value j), words).
    """
    unpack, pack, n = (_unpack_4, _pack_4, 4) if dtype == "fp32" else (*_pairs(*PAIRS[dtype]), 8)
    accumulate_all = tuple_of(n, lambda j: device_fn(lambda w, x, s: fma_rn(w, x[j], s[j])))
    add_all = tuple_of(n, lambda j: device_fn(lambda v, x: add_rn(v[j], x[j])))

    def each(fn):
        return tuple_of(n, lambda j: device_fn(lambda token, col, v, words: fn((token, i32(col + j), v[j]), words)))

    return namespace("vectors", n=n, zeros=tuple_of(n, lambda j: _zero), unpack=unpack, pack=pack, each=each,
                     accumulate=device_fn(lambda w, q, s: accumulate_all(w, unpack(q), s)),
                     add=device_fn(lambda v, q: add_all(v, unpack(q))))


_zero = device_fn(lambda: f32(0))
_unpack_4 = tuple_of(4, lambda j: device_fn(lambda q: u32_as_f32(q[j])))
_pack_4 = tuple_of(4, lambda j: device_fn(lambda v: f32_as_u32(v[j])))


def _pairs(low, high, pair):
    """(unpack, pack) of a type that has two numbers in a word."""
    @device_fn
    def unpack(q):
        return low(q[0]), high(q[0]), low(q[1]), high(q[1]), low(q[2]), high(q[2]), low(q[3]), high(q[3])

    @device_fn
    def pack(v):
        return pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])

    return unpack, pack
