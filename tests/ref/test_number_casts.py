"""Casts: all bf16 bit patterns against ml_dtypes where the semantics agree, and the vectors where they do not."""

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16, float4_e2m1fn, float8_e4m3fn, float8_e8m0fnu

from epmoe_ref import casts

ALL_BF16 = np.arange(65536, dtype=np.uint16).view(bfloat16)
X = ALL_BF16.astype(np.float32)
NAN = np.isnan(X)


def codes(array):
    return np.asarray(array).view(np.uint8)


def test_e4m3_is_the_nearest_code_and_saturates():
    got = codes(casts.to_e4m3(X))
    with np.errstate(invalid="ignore"):
        theirs = codes(X.astype(float8_e4m3fn))
    finite = np.abs(X) <= 464  # above, ml_dtypes gives NaN
    assert np.array_equal(got[finite], theirs[finite])
    assert (got[(X > 464)] == 0x7E).all() and (got[X < -464] == 0xFE).all()
    assert (got[NAN] == 0x7F).all()  # ml_dtypes keeps the sign


@pytest.mark.parametrize(
    "bits, byte",
    [
        (0x003FFFFF, 0),
        (0x00400000, 0),
        (0x00400001, 1),
        (0x7F800000, 255),
        (0x403FFFFF, 129),
        (0x40400001, 129),
        (0x00000000, 0),
        (0x3F800000, 127),
        (0x40800000, 129),
        (0x45800000, 139),
        (0x80000000, 0),
        (0xC5800000, 139),
        (0xBF800000, 127),
        (0x7F000000, 254),
        (0x7F7FFFFF, 254),
        (0x7FC00000, 255),
        (0xFFC00001, 255),
        (0x00800001, 2),
    ],
)
def test_e8m0_vectors(bits, byte):
    assert codes(casts.to_e8m0(np.array([bits], np.uint32).view(np.float32)))[0] == byte


def test_e8m0_is_the_power_of_two_that_is_not_smaller():
    finite = np.isfinite(X)
    x, scale = np.abs(X[finite]), casts.e8m0_to_float32(casts.to_e8m0(X[finite]))
    covered = x <= 2.0**127
    assert (scale[covered] >= x[covered]).all() and (scale[~covered] == 2.0**127).all()
    assert (scale[x > 2.0**-127] / 2 < x[x > 2.0**-127]).all() and (scale[x <= 2.0**-127] == 2.0**-127).all()
    powers = np.exp2(np.arange(-126, 128)).astype(np.float32)
    assert np.array_equal(codes(casts.to_e8m0(powers)), codes(powers.astype(float8_e8m0fnu)))


def test_e8m0_decodes_as_ml_dtypes_does():
    byte = np.arange(256, dtype=np.uint8)
    got, theirs = casts.e8m0_to_float32(byte), byte.view(float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(got, theirs, equal_nan=True) and got[0] == 2.0**-127 and np.isnan(got[255])


def test_e2m1_is_the_nearest_code_and_saturates():
    got = casts.to_e2m1(X)
    with np.errstate(invalid="ignore"):
        theirs = X.astype(float4_e2m1fn).view(np.uint8)
    assert np.array_equal(got[~NAN], theirs[~NAN])
    assert (got[NAN] == 7).all()


def test_e2m1_decodes_as_ml_dtypes_does_and_packs_the_even_element_low():
    code = np.arange(16, dtype=np.uint8)
    assert np.array_equal(casts.e2m1_to_float32(code), code.view(float4_e2m1fn).astype(np.float32))
    assert casts.pack_e2m1(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]
    every = np.arange(256, dtype=np.uint8).reshape(4, 64)
    assert np.array_equal(casts.pack_e2m1(casts.unpack_e2m1(every)), every)


def test_bf16_rounds_to_nearest_even_and_comes_back_unchanged():
    assert np.array_equal(casts.to_output_type(X[~NAN], bfloat16).view(np.uint16), ALL_BF16[~NAN].view(np.uint16))
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    bits = np.concatenate([bits, (bits & 0xFFFF0000) | 0x8000])  # and as many ties
    x = bits.view(np.float32)
    bits, x = bits[~np.isnan(x)].astype(np.uint64), x[~np.isnan(x)]
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(casts.to_output_type(x, bfloat16).view(np.uint16), nearest)
    assert casts.to_float32(ALL_BF16).tobytes() == (np.arange(65536, dtype=np.uint32) << 16).tobytes()


def test_absmax_starts_from_zero_and_ignores_nan():
    groups = np.float32([[np.nan, -3, 2], [np.nan] * 3, [-0.0] * 3, [1, -np.inf, np.nan]])
    assert casts.absmax(groups)[:, 0].tolist() == [3, 0, 0, np.inf]


@pytest.mark.parametrize("cast", [casts.to_e4m3, casts.to_e8m0, casts.to_e2m1])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_shapes_are_kept(cast, shape):
    x = np.full(shape, -2, np.float32)
    got = cast(x)
    assert got.shape == shape
    assert got.size == 0 or (codes(got) == codes(cast(x.reshape(-1)))[0]).all()
    assert ml_dtypes.finfo(float8_e4m3fn).max == casts.E4M3_MAX
