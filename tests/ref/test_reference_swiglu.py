"""fused_silu: the formulas of both variants, one rounding at the end, and blockwise FP8 output."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from epmoe_ref import BlockwiseFP8TokenFormat, EPValueError, fused_silu, fused_silu_fp8

OFFSETS = np.array([0, 3, 3, 9], np.uint32)


def gate_up(width=128, rows=9, scale=4.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, 2 * width)) * scale).astype(bfloat16)


def in_float64(x, limit=None, alpha=1.702):
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    if limit is None:
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def ulps(got, want):
    """Distance in bf16 steps, counted through zero."""

    def order(x):
        bits = x.astype(bfloat16).view(np.int16).astype(int)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(order(got) - order(want)).max()


@pytest.mark.parametrize("limit, alpha", [(None, 1.702), (7.0, 1.702), (0.5, 1.0), (2.0, -3.0)])
def test_formulas(limit, alpha):
    x = gate_up()
    got = fused_silu(x, OFFSETS, limit=limit, alpha=alpha)
    assert got.shape == (9, 128) and got.dtype == bfloat16
    assert ulps(got, in_float64(x, limit, alpha)) <= 1


def test_every_gate():
    gates = np.arange(65536, dtype=np.uint16).view(bfloat16)
    x = np.stack([gates, np.ones_like(gates)], axis=1)
    got = fused_silu(x, [0, 65536])[:, 0].astype(np.float32)
    with np.errstate(all="ignore"):
        gate = gates.astype(np.float32).astype(np.float64)
        want = gate / (1 + np.exp(-gate))
    normal = np.isfinite(gate) & (gate > -80)
    assert ulps(got[normal], want[normal].astype(np.float32)) <= 1
    assert np.isnan(got[np.isnan(gate) | (gate == -np.inf)]).all() and got[gate == np.inf] == np.inf
    # Far below, exp leaves float32: what remains is nothing or almost nothing, never NaN.
    assert (np.abs(got[np.isfinite(gate) & (gate <= -80)]) < 1e-30).all()


def test_clamps_pass_nan_on_and_act_on_one_side_of_the_gate():
    x = np.array([[np.nan, 100, -100, 1, 1, 1, 1, 1, 100, -100]], np.float32).astype(bfloat16)
    got = fused_silu(x, [0, 1], limit=7.0)[0].astype(np.float32)
    assert np.isnan(got[0])
    assert got[1] == bfloat16(2 * 7 / (1 + np.exp(-1.702 * 7))) and abs(got[2]) < 1e-20
    assert got[3] == bfloat16(8 / (1 + np.exp(-1.702))) and got[4] == bfloat16(-6 / (1 + np.exp(-1.702)))


@pytest.mark.parametrize("limit", [None, 7.0])
def test_fp8_output_is_quantised_from_float32_with_transposed_scales(limit):
    x = gate_up(256, 9)
    tokens, scales = fused_silu_fp8(x, OFFSETS, limit=limit)
    assert tokens.shape == (9, 256) and tokens.dtype == "float8_e4m3fn"
    assert scales.shape == (2, 9) and scales.dtype == np.float32
    want = in_float64(x, limit)
    largest = np.abs(want).reshape(9, 2, 128).max(axis=2)
    assert np.allclose(scales.T, np.maximum(largest, 1e-4) / 448, rtol=1e-6)
    value = tokens.astype(np.float64).reshape(9, 2, 128) * scales.T[..., None]
    half_a_step = np.maximum(np.abs(want) / 15.9, 1.01 * 2.0**-10 / 448 * largest.repeat(128, axis=1))
    assert (np.abs(value.reshape(9, 256) - want) <= half_a_step).all()


def test_fp8_of_values_that_bf16_holds_equals_the_token_format():
    x = np.zeros((4, 256), bfloat16)
    x[:, :128] = 100  # silu(100) is 100 exactly, so the result is 100 * up: two digits of bf16
    x[:, 128:] = np.random.default_rng(0).integers(-2, 3, (4, 128)).astype(bfloat16)
    tokens, scales = fused_silu_fp8(x, [0, 4])
    fmt = BlockwiseFP8TokenFormat(128, 1)
    values, want_scales = fmt.decode(fmt.encode(fused_silu(x, [0, 4])))
    assert np.array_equal(tokens.view(np.uint8), values.view(np.uint8)) and np.array_equal(scales.T, want_scales)


def test_exactly_the_rows_of_row_offsets_are_computed():
    x = gate_up(rows=12)
    x[9:] = np.nan
    assert len(fused_silu(x, OFFSETS)) == 9 and fused_silu_fp8(x, OFFSETS)[1].shape == (1, 9)
    assert fused_silu(x, [0]).shape == (0, 128) and fused_silu_fp8(x[:0], [0, 0])[0].shape == (0, 128)


def test_rows_do_not_depend_on_each_other():
    x = gate_up(128, 5000)
    assert np.array_equal(fused_silu(x, [0, 5000])[4321], fused_silu(x[4321:4322], [0, 1])[0])


@pytest.mark.parametrize(
    "call, args, options, words",
    [
        (fused_silu, (np.ones((9, 4), np.float32), OFFSETS), {}, "gate_up has float32 and must be a bfloat16 array"),
        (fused_silu, ([[1, 2]], [0, 1]), {}, "type list"),
        (fused_silu, (np.ones((9, 3), bfloat16), OFFSETS), {}, r"\[9, 3\]"),
        (fused_silu, (np.ones((8, 4), bfloat16), OFFSETS), {}, r"\[8, 4\] and must be \[9 or more rows, 2 \* width\]"),
        (fused_silu, (np.ones((9, 4), bfloat16), OFFSETS), {"limit": 0}, "limit=0 must be positive"),
        (fused_silu, (np.ones((9, 4), bfloat16), OFFSETS), {"limit": np.nan}, "limit=nan"),
        (fused_silu, (np.ones((9, 4), bfloat16), OFFSETS), {"limit": 1, "alpha": np.inf}, "alpha=inf must be finite"),
        (fused_silu_fp8, (np.ones((9, 192), bfloat16), OFFSETS), {}, "width=96 .* multiple of 128"),
    ],
)
def test_refusals(call, args, options, words):
    with pytest.raises(EPValueError, match=words):
        call(*args, **options)
