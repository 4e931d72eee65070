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
@pytest.mark.parametrize(
    "cast, dtype, reference, nan",
    [
        (casts.BF16X2, np.uint16, lambda x: to_output_type(x, np.dtype(bfloat16)), 0x7FFF),
        (casts.E4M3X2, np.uint8, to_e4m3, 0x7F),
    ],
    ids=["bf16", "e4m3"],
)
def test_pairs(cast, dtype, reference, nan, place):
    bits = float_bits()
    given = [np.full_like(bits, 0x3F800000)] * 2
    given[place] = bits
    got = (casts.run(cast, *given) >> np.uint32(8 * np.dtype(dtype).itemsize * place)).astype(dtype)
    right, is_nan = reference(bits.view(np.float32)).view(dtype), np.isnan(bits.view(np.float32))
    assert (got[is_nan] == nan).all()
    wrong = np.flatnonzero((got != right) & ~is_nan)
    assert not len(wrong), [(hex(bits[i]), hex(got[i]), hex(right[i])) for i in wrong[:3]]


def test_values_of_e4m3():
    codes = np.arange(256, dtype=np.uint32)
    for shift in (0, 8):
        word = codes << np.uint32(shift) | np.uint32(0x55 << (8 - shift))
        got = casts.run(casts.from_e4m3(shift), word).view(np.float32)
        right = np.array([arithmetic.e4m3_lo(int(c)) for c in codes], np.float32)
        finite = right == right
        assert (got.view(np.uint32) == right.view(np.uint32))[finite].all() and np.isnan(got[~finite]).all()
