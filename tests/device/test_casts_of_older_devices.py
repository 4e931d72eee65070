"""Casts by integer arithmetic, for devices below 8.0 and 8.9, give the reference's bits."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from epmoe.device import arithmetic, casts
from epmoe_ref.casts import to_e4m3, to_output_type


def float_bits():
    """All exponents with mantissas at, next to and between the ties of bf16 and e4m3, both signs; and random bits."""
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    return np.concatenate([(tops[:, None] | edges).reshape(-1), random])


@pytest.mark.parametrize("place", [0, 1], ids=["low", "high"])
def test_bf16_pairs(place):
    bits, other = float_bits(), np.uint32(0x3F800000)
    given = (bits, np.full_like(bits, other)) if place == 0 else (np.full_like(bits, other), bits)
    got = casts.run(casts.BF16X2, *given) >> np.uint32(16 * place) & np.uint32(0xFFFF)
    right = to_output_type(bits.view(np.float32), np.dtype(bfloat16)).view(np.uint16)
    assert_equal_unless_nan(bits, got, right, nan=0x7FFF)


@pytest.mark.parametrize("place", [0, 1], ids=["low", "high"])
def test_e4m3_pairs(place):
    bits, other = float_bits(), np.uint32(0x3F800000)
    given = (bits, np.full_like(bits, other)) if place == 0 else (np.full_like(bits, other), bits)
    got = casts.run(casts.E4M3X2, *given) >> np.uint32(8 * place) & np.uint32(0xFF)
    right = to_e4m3(bits.view(np.float32)).view(np.uint8)
    assert_equal_unless_nan(bits, got, right, nan=0x7F)


def test_values_of_e4m3():
    codes = np.arange(256, dtype=np.uint32)
    for shift in (0, 8):
        word = codes << np.uint32(shift) | np.uint32(0x55 << (8 - shift))
        got = casts.run(casts.from_e4m3(shift), word).view(np.float32)
        right = np.array([arithmetic.e4m3_lo(int(c)) for c in codes], np.float32)
        finite = right == right
        assert (got.view(np.uint32) == right.view(np.uint32))[finite].all() and np.isnan(got[~finite]).all()


def assert_equal_unless_nan(bits, got, right, nan):
    is_nan = np.isnan(bits.view(np.float32))
    assert (got[is_nan] == nan).all()
    wrong = np.flatnonzero((got != right) & ~is_nan)
    assert not len(wrong), [(hex(bits[i]), hex(got[i]), hex(right[i])) for i in wrong[:3]]
