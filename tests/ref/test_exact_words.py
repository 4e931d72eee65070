"""mul_rn, add_rn and fma_rn of special values and shapes. That they round once: tests/oracle."""

import numpy as np

from epmoe_ref import add_rn, fma_rn, mul_rn


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
