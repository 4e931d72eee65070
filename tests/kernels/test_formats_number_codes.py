"""Law: the integer conversions and the cheap quotient are the conversions and the quotient, to the bit."""

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn
from row_kernels import map_words

from epmoe.device import bf16_lo, device_fn, div_rn, f32, f32_as_u32, max_f32, sub_rn, u32, u32_as_f32
from epmoe.kernels.formats.blockwise_fp8 import PER_448, quotient
from epmoe.kernels.formats.mxfp4 import even_scale
from epmoe.kernels.formats.number_codes import e2m1_code, e4m3_byte, e8m0_reciprocal, e8m0_round_up
from epmoe_ref import casts

E4M3_VALUES = np.arange(127, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)


@device_fn
def e2m1_word(bits):
    return e2m1_code(u32_as_f32(bits))


@device_fn
def e4m3_word(bits):
    return e4m3_byte(u32_as_f32(bits))


@device_fn
def e8m0_word(bits):
    return e8m0_round_up(u32_as_f32(bits))


@device_fn
def reciprocal_word(byte):
    return f32_as_u32(e8m0_reciprocal(byte))


@device_fn
def even_scale_word(bits):
    return even_scale(u32_as_f32(bits), f32(1.0))[0]


@device_fn
def scale_word(absmax):
    """absmax is a bf16 pattern; 0 takes the scale's floor 1e-4."""
    return f32_as_u32(quotient(max_f32(bf16_lo(absmax), f32(1e-4)), f32(-448.0), f32(PER_448)))


@device_fn
def quotient_word(pair):
    """The patterns of absmax and x are the high and the low half."""
    scale = div_rn(max_f32(bf16_lo(u32(pair >> u32(16))), f32(1e-4)), f32(448.0))
    return f32_as_u32(quotient(bf16_lo(pair), sub_rn(f32(0.0), scale), div_rn(f32(1.0), scale)))


def floats_about(values):
    """float32 bits of the values and their four neighbours, with both signs."""
    bits = np.asarray(values, np.float32).reshape(-1).view(np.uint32).astype(np.int64)
    near = np.unique(np.clip(bits[:, None] + np.arange(-2, 3), 0, 0x7FFFFFFF))
    return np.concatenate([near, near | 0x80000000]).astype(np.uint32)


def floats_of_every_kind(values, n):
    """As floats_about, also about zero, the smallest normal number, infinity and NaN, and random bits."""
    rng, special = np.random.default_rng(1), floats_about([0, 2.0**-126, np.inf, np.nan])
    codes_range = rng.integers(0x3D000000, 0x44000000, n) | rng.integers(0, 2, n) << 31
    return np.concatenate([floats_about(values), special, rng.integers(0, 2**32, n), codes_range]).astype(np.uint32)


def as_float(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def code_points(values):
    return np.concatenate([values, (values[1:] + values[:-1]) / 2])


@pytest.mark.parametrize("n", [500, pytest.param(1 << 22, marks=pytest.mark.gpu)], ids=str)
def test_conversions_at_and_beside_every_code_and_every_tie(n):
    for word, cast, values in (
        (e2m1_word, casts.to_e2m1, code_points(casts.E2M1_VALUES)),
        (e4m3_word, casts.to_e4m3, code_points(E4M3_VALUES)),
        (e8m0_word, casts.to_e8m0, 2.0 ** np.arange(-149, 128)),
    ):
        bits = floats_of_every_kind(values, n)
        np.testing.assert_array_equal(map_words(word, bits), cast(as_float(bits)).view(np.uint8))
    bits = floats_of_every_kind(2.0 ** np.arange(-126, 127)[:, None] * [1.0, 1.75, 1.5], n) & 0x7FFFFFFF
    bits = bits[bits <= 0x7F800000]
    exponent = np.floor(np.log2(np.maximum(as_float(bits).astype(np.float64), 2.0**-149)))
    rounded_up = as_float(bits).astype(np.float64) >= 1.75 * 2.0**exponent
    expected = np.where(as_float(bits) == np.inf, 253, np.clip(exponent + rounded_up - 2 + 127, 0, 254))
    np.testing.assert_array_equal(map_words(even_scale_word, bits), expected)


@pytest.mark.parametrize("on", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_quotient_is_ieee_division_for_all_significands(on):
    # every significand a scale can have, and the floor
    absmax = np.concatenate([[0], np.arange(0x3F80, 0x4000)])
    x = np.arange(0x3F80, 0x4000)  # every significand of a bf16 number
    pairs = (absmax[:, None] << 16 | x).astype(np.uint32)
    scale = np.maximum(as_float(absmax << 16), np.float32(1e-4)) / np.float32(448)
    expected = as_float(x << 16) / scale[:, None]
    np.testing.assert_array_equal(map_words(scale_word, absmax), scale.view(np.uint32))
    np.testing.assert_array_equal(map_words(quotient_word, pairs.reshape(-1)), expected.view(np.uint32).reshape(-1))


def test_e8m0_reciprocals():
    byte = np.arange(256)
    got = as_float(map_words(reciprocal_word, byte))
    np.testing.assert_array_equal(got, np.float32(1) / casts.e8m0_to_float32(byte.astype(np.uint8)))


@pytest.mark.gpu
def test_every_float32_of_the_code_range_on_the_gpu():
    """All float32 from 2**-3 to 8 and their negatives to e2m1: 2 x 6 binades of 2**23 numbers."""
    for sign in (0, 0x80000000):
        bits = np.arange(0x3E000000, 0x41000001, dtype=np.uint32) | np.uint32(sign)
        np.testing.assert_array_equal(map_words(e2m1_word, bits), casts.to_e2m1(as_float(bits)))
