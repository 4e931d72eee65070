"""mul_rn, add_rn and fma_rn: one rounding each, against rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from epmoe_ref import add_rn, fma_rn, mul_rn


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to a rational, ties to even, as a Python float (exactly)."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    ulp = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(magnitude / ulp) * ulp  # Python rounds a half to even
    result = float(rounded) if rounded < 2**128 else float("inf")
    return result if value >= 0 else -result


def any_float32(rng, n):
    x = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1.5))


def half_way(rng, n):
    """a * b is half an ulp of c, or next to it, where double rounding is wrong."""
    c = (1 + rng.integers(0, 8, n) * 2.0**-23) * np.exp2(rng.integers(-100, 100, n))
    a = np.spacing(c.astype(np.float32)) * 0.5 * (1 + rng.integers(-3, 4, n) * 2.0**-23)
    b = np.where(rng.random(n) < 0.5, 1, -1) * (1 + rng.integers(-3, 4, n) * 2.0**-23)
    return a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)


def subnormal_result(rng, n):
    a = np.exp2(-rng.integers(60, 80, n)) * (1 + rng.integers(0, 2**23, n) * 2.0**-23)
    b = np.exp2(-rng.integers(50, 80, n)) * (1 + rng.integers(0, 2**23, n) * 2.0**-23)
    c = rng.integers(-1000, 1000, n) * 2.0**-149
    return a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)


def subnormal_half_way(rng, n):
    """a * b is half of the smallest subnormal, less or more by so little that a float64 sum with c loses it."""
    sign = np.where(rng.random(n) < 0.5, 1, -1)
    a = 2.0**-75 * (1 + 2.0**-23 * rng.integers(-1, 2, n))
    b = 2.0**-75 * (1 + 2.0**-23 * rng.integers(-1, 2, n)) * sign
    c = rng.integers(-(2**20), 2**20, n) * 2.0**-149
    return a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)


def router_weights_and_bf16(rng, n):
    bf16 = (rng.integers(0, 2**16, n, dtype=np.uint32) << 16).view(np.float32)
    return (rng.random(n, dtype=np.float32), np.where(np.isfinite(bf16), bf16, np.float32(1)), any_float32(rng, n))


CASES = {
    "any": lambda rng, n: tuple(any_float32(rng, n) for _ in range(3)),
    "half way": half_way,
    "subnormal": subnormal_result,
    "subnormal half way": subnormal_half_way,
    "weights": router_weights_and_bf16,
}


@pytest.mark.parametrize("case", CASES)
def test_fma_rounds_once(case):
    a, b, c = CASES[case](np.random.default_rng(1), 3000)
    got = fma_rn(a, b, c)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        want = nearest_float32(Fraction(x) * Fraction(y) + Fraction(z))
        assert result == want, f"fma({x!r}, {y!r}, {z!r}) = {result!r}, not {want!r}"


@pytest.mark.parametrize("case", [half_way, subnormal_half_way])
def test_the_half_way_cases_catch_a_second_rounding(case):
    a, b, c = case(np.random.default_rng(1), 3000)
    rounded_twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert np.count_nonzero(rounded_twice != fma_rn(a, b, c)) > 100


def test_mul_and_add_round_once_and_keep_subnormals():
    rng = np.random.default_rng(2)
    a, b = subnormal_result(rng, 500)[0], any_float32(rng, 500)
    for x, y, product, total in zip(a.tolist(), b.tolist(), mul_rn(a, b).tolist(), add_rn(a, b).tolist()):
        assert product == nearest_float32(Fraction(x) * Fraction(y))
        assert total == nearest_float32(Fraction(x) + Fraction(y))
    assert mul_rn(2.0**-100, 2.0**-49) == 2.0**-149


def test_special_values():
    inf, nan = np.inf, np.nan
    assert fma_rn(inf, 1, 1) == inf and fma_rn(-inf, 1, 1) == -inf and fma_rn(2.0**127, 2, -inf) == -inf
    assert all(np.isnan(x) for x in (fma_rn(inf, 0, 1), fma_rn(nan, 1, 1), fma_rn(inf, 1, -inf), fma_rn(1, 1, nan)))
    assert fma_rn(2.0**127, 2, 0) == inf and mul_rn(2.0**127, 2) == inf
    # The largest float32 plus just under half its ulp stays finite.
    largest = float(np.finfo(np.float32).max)
    assert fma_rn(2.0**103 - 2.0**79, 1, largest) == largest and fma_rn(2.0**103, 1, largest) == inf


def test_sign_of_zero():
    assert not np.signbit(fma_rn(-1, 0, 0)) and np.signbit(fma_rn(-1, 0, -0.0))
    assert np.signbit(fma_rn(-(2.0**-100), 2.0**-100, 0))  # an underflow, not a cancellation


def test_words_broadcast_and_give_float32():
    out = fma_rn(np.ones((3, 1)), np.arange(4), 0.5)
    assert out.dtype == np.float32 and out.shape == (3, 4) and out[2, 3] == 3.5
    assert all(type(word(1, 2)) is np.float32 for word in (mul_rn, add_rn)) and type(fma_rn(1, 2, 3)) is np.float32
    assert fma_rn(np.empty((0, 5)), 1, 1).shape == (0, 5)
