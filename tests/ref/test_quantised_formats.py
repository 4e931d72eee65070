"""Encoders: values by hand, and the edge cases: zero groups, underflow, NaN, Inf, subnormals, every bf16 pattern."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from epmoe_ref import BF16TokenFormat, BlockwiseFP8TokenFormat, MXFP4TokenFormat, NVBlockScaledTokenFormat, casts

F32 = np.float32
FP8 = BlockwiseFP8TokenFormat(128, 1)
NVFP4, NVMXFP4, NVMXFP8 = (NVBlockScaledTokenFormat(128, 1, kind=kind) for kind in ("nvfp4", "mxfp4", "mxfp8"))
MXFP4 = MXFP4TokenFormat(128, 1)
QUANTISED = {"fp8_blockwise": FP8, "nvfp4": NVFP4, "mxfp4": NVMXFP4, "mxfp8": NVMXFP8, "mxfp4_rows": MXFP4}
INF, NAN = np.inf, np.nan


def encode(fmt, first_values, fill=0.0, input_scale=1.0):
    """Codes of a group of the values followed by `fill`, and its scale byte or float."""
    x = np.full((1, 128), fill, np.float32)
    x[0, : len(first_values)] = first_values
    values, scales = fmt.decode(fmt.encode(x.astype(bfloat16), input_scale))
    values = values.view(np.uint8)
    if values.shape[1] == 64:
        values = casts.unpack_e2m1(values)
    scale = scales[0, 0] if scales.dtype == np.float32 else int(scales.view(np.uint8)[0, 0])
    return values[0, : max(len(first_values), 1)].tolist(), scale


def dequantised(fmt, rows):
    values, scales = fmt.decode(fmt.encode(rows))
    if values.dtype == np.uint8:
        values = casts.e2m1_to_float32(casts.unpack_e2m1(values))
    if scales.dtype != np.float32 and fmt is not NVFP4:
        scales = casts.e8m0_to_float32(scales)
    x = values.astype(np.float64).reshape(len(rows), -1, fmt.group_size) * scales.astype(np.float64)[..., None]
    return x.reshape(len(rows), -1)


def test_bf16_keeps_every_bit_pattern():
    rows = np.arange(65536, dtype=np.uint16).view(bfloat16).reshape(-1, 64)
    assert BF16TokenFormat(64, 1).decode(BF16TokenFormat(64, 1).encode(rows))[0].tobytes() == rows.tobytes()


# Half a step relative to the value, and for values below the first step relative to the largest of the group: the
# largest is at 448 (FP8), near 6 (NVFP4), above 3, above 224 and above 3.5 scales.
@pytest.mark.parametrize(
    "fmt, relative, absolute",
    [
        (FP8, 2**-4, 2**-10 / 448),
        (NVFP4, 0.25, 0.27 / 6),
        (NVMXFP4, 0.25, 0.25 / 3),
        (NVMXFP8, 2**-4, 2**-10 / 224),
        (MXFP4, 0.25, 0.25 / 3.5),
    ],
    ids=QUANTISED,
)
def test_values_come_back_within_half_a_step(fmt, relative, absolute):
    x = np.random.default_rng(0).standard_normal((200, 128)).astype(bfloat16)
    exact = x.astype(np.float64)
    largest = np.abs(exact).reshape(200, -1, fmt.group_size).max(axis=-1).repeat(fmt.group_size, axis=1)
    error = np.abs(dequantised(fmt, x) - exact)
    assert (error <= np.maximum(relative * np.abs(exact) * 1.01, absolute * largest)).all()


def test_fp8_by_hand():
    codes, scale = encode(FP8, [448, 1, -2, 464, 2.0**-9])
    assert scale == F32(464) / F32(448)
    want = casts.to_e4m3(np.clip(F32([448, 1, -2, 464, 2.0**-9]) / scale, -448, 448)).view(np.uint8).tolist()
    assert codes == want and codes[3] == 0x7E
    assert encode(FP8, [0.0, -0.0]) == ([0, 0x80], F32(1e-4) / F32(448))
    assert encode(FP8, [5e-5])[1] == F32(1e-4) / F32(448)


def test_nvfp4_by_hand():
    assert encode(NVFP4, [6, -3, 0.5, 0.2, -0.0]) == ([7, 13, 1, 0, 8], 0x38)  # scale 1.0
    assert encode(NVFP4, [12, 6, 1]) == ([7, 5, 1], 0x40)  # scale 2.0
    # With g = 64 the stored scale is 64 times as large and a value is code * scale / 64.
    assert encode(NVFP4, [6, -3, 0.5], input_scale=64.0) == ([7, 13, 1], 0x68)
    assert encode(NVFP4, [6e-4, 3e-4], input_scale=1024.0)[0] == [7, 5]
    assert encode(NVFP4, [6e-4, 3e-4])[0] == [0, 0]  # without g the scale underflows


def test_divisions_and_reciprocals_are_those_of_the_formulas():
    """Inputs at ties, where a division instead of a reciprocal, or the reverse, gives the neighbouring code."""
    assert encode(FP8, [9.870529e-05], fill=1.078125)[0] == [18]  # x * (1 / s) would give 19
    # 1/6 is rounded up, so 3 * (6.25 * (1/6)) lies above the tie 3.125; 3 * (6.25 / 6) and (3 * (1/6)) * 6.25 do not.
    assert encode(NVFP4, [6.25], input_scale=3)[1] == 0x45
    # 1/3 is rounded up, so k comes out smaller than 1 / (f32(s8) / 3), and 0.15625 * k stays at the tie .25.
    assert encode(NVFP4, [0.15625], fill=1.1875, input_scale=3)[0] == [1]


@pytest.mark.parametrize(
    "fmt, largest, byte",
    [
        (NVMXFP4, 6, 127),
        (NVMXFP4, 6.03125, 128),
        (NVMXFP4, 3, 126),
        (NVMXFP4, 1, 125),
        (NVMXFP8, 448, 127),
        (NVMXFP8, 450, 128),
        (NVMXFP8, 1, 119),
    ],
)
def test_mx_scales_by_hand(fmt, largest, byte):
    # 1/6 and 1/448 are rounded to float32, so 6 * (1/6) may land on either side of 1: it is 1 exactly.
    codes, scale = encode(fmt, [largest, -largest / 2])
    assert scale == byte
    exact = F32(largest) / F32(2.0) ** (byte - 127)
    cast = casts.to_e2m1 if fmt is NVMXFP4 else casts.to_e4m3
    assert codes == cast(F32([exact, -exact / 2])).view(np.uint8).tolist()


@pytest.mark.parametrize("largest, byte", [(1.6, 125), (6, 127), (7, 128), (0, 0), (3, 126), (5, 127), (3.5, 127)])
def test_even_scales_by_hand(largest, byte):
    assert encode(MXFP4, [largest])[1] == byte


@pytest.mark.parametrize("name", QUANTISED)
def test_a_zero_group_encodes_as_zeros_with_their_signs(name):
    codes, scale = encode(QUANTISED[name], [0.0, -0.0])
    assert codes == ([0, 8] if "fp4" in name else [0, 0x80])
    assert scale == (F32(1e-4) / F32(448) if name == "fp8_blockwise" else 0)


@pytest.mark.parametrize("name", QUANTISED)
def test_groups_of_the_smallest_numbers_never_become_nan(name):
    tiny = 2.0**-133  # the smallest bf16 subnormal
    codes, scale = encode(QUANTISED[name], [tiny, -tiny, 0])
    if name in ("mxfp4", "mxfp8"):
        # byte 0 is 2^-127, k = 2^127: the value is 2^-6 of the scale.
        assert scale == 0 and codes == ([0, 8, 0] if name == "mxfp4" else [8, 0x88, 0])
    else:
        assert codes == ([0, 8, 0] if "fp4" in name else [0, 0x80, 0])


@pytest.mark.parametrize("name", QUANTISED)
def test_nan_is_ignored_by_the_scale_and_encodes_as_itself(name):
    fmt, nan = QUANTISED[name], 7 if "fp4" in name else 0x7F
    codes, scale = encode(fmt, [6, NAN, -1.5, -NAN])
    clean, clean_scale = encode(fmt, [6, 0, -1.5, 0])
    assert scale == clean_scale and codes == [clean[0], nan, clean[2], nan]
    # A group of nothing but NaN has the scale of zeros.
    assert encode(fmt, [NAN], fill=NAN) == ([nan], encode(fmt, [0.0])[1])


@pytest.mark.parametrize(
    "name, codes, scale",
    [
        ("fp8_blockwise", [0x7F, 0, 0x80, 0x7F], np.inf),
        ("nvfp4", [7, 0, 8, 15], 0x7E),
        ("mxfp4", [7, 7, 7, 7], 0xFF),
        ("mxfp8", [0x7F] * 4, 0xFF),
        ("mxfp4_rows", [7, 0, 8, 15], 253),
    ],
)
def test_infinity_follows_the_formulas(name, codes, scale):
    assert encode(QUANTISED[name], [INF, 1, -1, -INF], fill=1) == (codes, scale)


def test_nvfp4_saturates_its_scale_before_infinity():
    assert encode(NVFP4, [1e5, 1e4]) == ([7, 7], 0x7E)
    assert encode(NVFP4, [1e4, 1e3])[1] == 0x7E and encode(NVFP4, [-1e5, 2e2]) == ([15, 1], 0x7E)
