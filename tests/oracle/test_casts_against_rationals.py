"""The casts and exact intrinsics against whole-number arithmetic, on float32 bits where double rounding shows."""

import itertools

import exact_codes as codes
import exact_float32 as f32
import ml_dtypes
import numpy as np
import pytest
from random_worlds import bits_of

import epmoe
import epmoe_ref
from epmoe_ref import casts

KINDS = ("ordinary", "anything", "tiny", "huge", "coarse", "salted")


def floats(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def equal_numbers(actual, expected_bits):
    """Where float32 arrays differ from the expected bits, NaN being equal to NaN."""
    bits = np.asarray(actual).view(np.uint32)
    expected = np.asarray(expected_bits, np.uint32)
    nan = np.isnan(floats(expected)) & np.isnan(np.asarray(actual))
    return np.flatnonzero((bits != expected) & ~nan)


def around(values):
    """Each value, its float32 neighbours, and all negated."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    near = np.concatenate([bits, bits + 1, np.where(bits > 0, bits - 1, bits)])
    return np.concatenate([near, near | 0x80000000])


def midpoints(table):
    """Float32 numbers halfway between neighbours of a table of exact values."""
    return np.array([f32.to_bits(f32.round_scaled(a + b, 1)) for a, b in zip(table, table[1:])], np.uint32)


def cast_inputs(table, seed):
    rng = np.random.default_rng(seed)
    some = midpoints(table) if len(table) < 300 else midpoints(table)[rng.integers(0, len(table) - 1, 3000)]
    return np.concatenate([around(floats(some))] + [bits_of(rng, kind, 2000, 8, 23) for kind in KINDS])


@pytest.mark.parametrize(
    "name, table, exact",
    [
        ("to_e4m3", codes.E4M3, codes.to_e4m3),
        ("to_e2m1", codes.E2M1, codes.to_e2m1),
        ("to_e8m0", codes.E8M0, codes.to_e8m0),
    ],
)
def test_casts_to_small_types(name, table, exact):
    bits = cast_inputs(table, 1)
    actual = getattr(casts, name)(floats(bits)).view(np.uint8)
    expected = np.array([exact(f32.from_bits(b)) for b in bits.tolist()], np.uint8)
    wrong = np.flatnonzero(actual != expected)
    assert not len(wrong), (
        f"{name}(0x{bits[wrong[0]]:08x}) is 0x{actual[wrong[0]]:02x}, "
        f"expected 0x{expected[wrong[0]]:02x}; {len(wrong)} of {len(bits)} differ"
    )


@pytest.mark.parametrize("name, dtype", [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp32", np.float32)])
def test_casts_to_output_types(name, dtype):
    kind = codes.OUTPUT_TYPES[name]
    bits = cast_inputs(codes.BF16 if name == "bf16" else codes.FP16, 2)
    actual = casts.to_output_type(floats(bits), np.dtype(dtype))
    assert actual.dtype == dtype
    for b, result in zip(bits.tolist(), np.ascontiguousarray(actual).view(f"u{actual.itemsize}").tolist()):
        expected = kind.to_bits(f32.from_bits(b))
        assert result == expected or (kind.is_nan_bits(result) and kind.is_nan_bits(expected)), hex(b)


def test_codes_back_to_float32():
    every = np.arange(256, dtype=np.uint8)
    assert not len(equal_numbers(casts.e8m0_to_float32(every), [f32.to_bits(codes.from_e8m0(c)) for c in range(256)]))
    assert not len(
        equal_numbers(casts.e2m1_to_float32(every[:16]), [f32.to_bits(codes.from_e2m1(c)) for c in range(16)])
    )
    assert np.array_equal(casts.pack_e2m1(casts.unpack_e2m1(every)), every)
    assert np.array_equal(casts.pack_e2m1(np.array([1, 2], np.uint8)), [0x21])


def hard_sums():
    """Bits (a, b, c) whose exact a * b + c lies close to the middle between two float32 numbers, or near 2**-149."""
    rng, n = np.random.default_rng(3), 1500
    i = rng.integers(1, 180, n)
    up, down = (0x3F800000 + i), np.float32(1) - i.astype(np.float32) * np.float32(2.0**-23)
    # a * b is 1 - tiny: half a unit of c, nearly
    base = rng.integers(1 << 23, 1 << 24, n).astype(np.float64)
    c = (base * rng.choice([2.0, -2.0], n)).astype(np.float32)
    near_tie = np.stack([up, down.view(np.uint32), c.view(np.uint32)], axis=1)
    exact_tie = near_tie.copy()
    exact_tie[:, :2] = 0x3F800000
    # the same, scaled by powers of two down into the subnormals
    scaled = near_tie[:, 0] - (rng.integers(0, 100, n) << 23)
    small = np.stack([scaled, near_tie[:, 1] - (49 << 23), bits_of(rng, "tiny", n, 8, 23)], axis=1)
    # a * b is half of the smallest subnormal, nearly; c is so much larger that a float64 sum loses the difference
    halves = 2.0**-75 * (1 + 2.0**-23 * rng.integers(-1, 2, (n, 2))) * [1, -1]
    subnormal = np.column_stack([halves, rng.integers(-(2**20), 2**20, n) * 2.0**-149]).astype(np.float32)
    parts = [near_tie, exact_tie, small, subnormal.view(np.uint32)]
    for a_kind, c_kind in itertools.product(KINDS, KINDS):
        columns = [bits_of(rng, kind, 150, 8, 23) for kind in (a_kind, "ordinary", c_kind)]
        parts.append(np.stack(columns, axis=1))
    triples = np.concatenate(parts).astype(np.uint32)
    cancelling = triples[-2000:].copy()
    cancelling[:, 2] = [
        f32.to_bits(f32.mul(f32.from_bits(a), f32.from_bits(b))) ^ 0x80000000 for a, b in cancelling[:, :2].tolist()
    ]
    return np.concatenate([triples, cancelling])


@pytest.mark.parametrize("package", [epmoe, epmoe_ref], ids=lambda package: package.__name__)
@pytest.mark.parametrize(
    "word, operation, columns",
    [("mul_rn", f32.mul, (0, 1)), ("add_rn", f32.add, (1, 2)), ("fma_rn", f32.fma, (0, 1, 2))],
)
def test_exact_words_round_once(package, word, operation, columns):
    triples = hard_sums()
    actual = getattr(package, word)(*(floats(np.ascontiguousarray(triples[:, i])) for i in columns))
    assert np.asarray(actual).dtype == np.float32
    expected = [f32.to_bits(operation(*(f32.from_bits(row[i]) for i in columns))) for row in triples.tolist()]
    wrong = equal_numbers(actual, expected)
    if len(wrong):
        at = wrong[0]
        raise AssertionError(
            f"{word} of bits {[hex(b) for b in triples[at]]} is {np.asarray(actual)[at]!r}, "
            f"expected bits 0x{expected[at]:08x}; {len(wrong)} of {len(triples)} differ"
        )


def test_the_hard_sums_would_catch_two_roundings():
    """float64 rounded to float32 is wrong for many of them, so the test above can fail."""
    triples = hard_sums()
    with np.errstate(all="ignore"):
        a, b, c = (floats(np.ascontiguousarray(triples[:, i])).astype(np.float64) for i in range(3))
        twice = (a * b + c).astype(np.float32)
    expected = [f32.to_bits(f32.fma(*(f32.from_bits(x) for x in row))) for row in triples.tolist()]
    assert len(equal_numbers(twice, expected)) > 100
