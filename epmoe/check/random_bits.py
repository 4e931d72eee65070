"""Pseudo-random integers that are the same on every machine, in every NumPy version and in any language.

This is SplitMix64 with random access: word i of a stream is mix(seed + (i + 1) * GOLDEN), modulo 2**64. It uses only
integer operations, so inputs of golden vectors need no recorded streams of np.random.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
"""

import ml_dtypes
import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
# float type -> (unsigned integer of its width, mantissa bits, exponent bias)
_FLOATS = {
    "bf16": (np.uint16, 7, 127, ml_dtypes.bfloat16),
    "fp16": (np.uint16, 10, 15, np.float16),
    "fp32": (np.uint32, 23, 127, np.float32),
}


@np.errstate(over="ignore")
def mix(words):
    """The output function of SplitMix64 on an array of uint64."""
    words = np.asarray(words, np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@np.errstate(over="ignore")
def stream(*key):
    """The seed of the stream named by a tuple of small numbers or of equally shaped int arrays; uint64."""
    seed = np.zeros((), np.uint64)
    for part in key:
        seed = mix(seed * np.uint64(GOLDEN) + np.asarray(part).astype(np.int64).astype(np.uint64) + np.uint64(1))
    return seed


def words(seed, n):
    """The first n words of a stream (or of each stream of an array of seeds, along a new last axis); uint64."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix(np.asarray(seed, np.uint64)[..., None] + steps)


def floats(dtype, seed, n, exponents=(-4, 3)):
    """n numbers of a stream: random sign and mantissa, power of two uniform in `exponents` (both included)."""
    unsigned, mantissa_bits, bias, kind = _FLOATS[dtype]
    random = words(seed, n)
    low, high = exponents
    exponent = (random >> np.uint64(40)) % np.uint64(high - low + 1) + np.uint64(low + bias)
    bits = (
        (random >> np.uint64(63)) << np.uint64(8 * np.dtype(unsigned).itemsize - 1)
        | exponent << np.uint64(mantissa_bits)
        | random & np.uint64(2**mantissa_bits - 1)
    )
    return bits.astype(unsigned).view(kind)


def permutations(seed, n_rows, n):
    """n_rows independent permutations of 0 .. n - 1; int64 [n_rows, n]."""
    return np.argsort(words(seed, n_rows * n).reshape(n_rows, n), axis=1, kind="stable")
