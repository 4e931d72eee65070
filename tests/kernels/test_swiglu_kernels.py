"""Law: the gated rows agree with the formula in float64 within one bf16 ulp (FP8: one code), for as many rows as
row_offsets says on the device, and no other row is written."""

import ml_dtypes
import numpy as np
import pytest

from epmoe import device
from epmoe.kernels import Wanted
from epmoe.kernels.launch import LaunchConfig
from epmoe.kernels.swiglu import fused_silu_kernel
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

BF16 = ml_dtypes.bfloat16
POISON = 0xCD
LIMIT, ALPHA = 7.0, 1.702
ON_GPU = [pytest.param(n, n_rows, 2048, marks=pytest.mark.gpu) for n, n_rows in ((4096, 4001), (16, 3))]


def config(n_groups=3):
    return EPConfig(1, n_groups, 1, 8, 16)


def swish(gate, alpha):
    """gate * sigmoid(alpha * gate) in float64, but with an exponential that overflows where float32 does."""
    exponential = np.exp(-alpha * gate)
    return gate / (1 + np.where(exponential > np.finfo(np.float32).max, np.inf, exponential))


def gated_rows(rows, limit, alpha):
    """float64 [n, intermediate] of bf16 rows [n, 2 intermediate]."""
    gate, up = np.split(rows.astype(np.float64), 2, axis=1)
    with np.errstate(all="ignore"):
        if limit is None:
            return swish(gate, 1) * up
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1) * swish(gate, alpha)


def run(cfg, rows, n_rows, intermediate, launch=None, seed=0, **options):
    """Output bytes [capacity, ...], and scales [intermediate / 128, capacity] or None; both held POISON before."""
    machine = device.machine(1, seed=seed, racecheck=True)
    capacity = len(rows)
    itemsize = 1 if options.get("output_format") == "fp8_blockwise" else 2
    src = machine.alloc(rows.nbytes, "gate and up")
    src.write(rows.view(np.uint16))
    out = machine.alloc(capacity * intermediate * itemsize, "output")
    out.fill(POISON)
    scales = machine.alloc(max(16, capacity * intermediate // 128 * 4), "scales")
    scales.fill(POISON)
    offsets = machine.alloc(4 * (cfg.n_groups + 1), "row_offsets")
    offsets.write(np.linspace(0, n_rows, cfg.n_groups + 1).astype(np.uint32))
    call = fused_silu_kernel(cfg, launch, intermediate=intermediate, **options)
    launch = call.prepared(Wanted(0, 0, machine, machine.stream(0), {}))
    launch.start(src.address, offsets.address, out.address, scales.address, capacity)
    machine.synchronize()
    return (
        out.read(np.uint8, (capacity, intermediate * itemsize)),
        scales.read(np.float32, (intermediate // 128, capacity)) if itemsize == 1 else None,
    )


def random_rows(n, intermediate, seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, 2 * intermediate)) * rng.choice([0.01, 1, 4, 30], (n, 1))).astype(BF16)


def ordered(bf16_bits):
    """Integers in which neighbouring bf16 numbers differ by one."""
    magnitude = (bf16_bits & 0x7FFF).astype(np.int64)
    return np.where(bf16_bits & 0x8000, -magnitude, magnitude)


def check_bf16(n, n_rows, intermediate, limit=None, rows=None):
    rows = random_rows(n, intermediate, seed=intermediate) if rows is None else rows
    out, _ = run(config(), rows, n_rows, intermediate, limit=limit, alpha=ALPHA)
    with np.errstate(all="ignore"):
        expected = gated_rows(rows[:n_rows], limit, ALPHA).astype(np.float32).astype(BF16)
    got = out[:n_rows].view(BF16)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    distance = np.abs(ordered(got.view(np.uint16)) - ordered(expected.view(np.uint16)))[~nan]
    assert distance.max(initial=0) <= 1
    assert (out[n_rows:] == POISON).all()


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("n, n_rows, intermediate", [(8, 5, 128), (4, 4, 640), (4, 0, 256), *ON_GPU])
def test_fp8_rows_with_transposed_scales(n, n_rows, intermediate, limit):
    launch = None if device.SIM else LaunchConfig(num_threads=512)
    rows = random_rows(n, intermediate, seed=intermediate + 1)
    rows[0] = 0
    out, scales = run(
        config(), rows, n_rows, intermediate, launch, limit=limit, alpha=ALPHA, output_format="fp8_blockwise"
    )
    exact = gated_rows(rows[:n_rows], limit, ALPHA)
    groups = exact.reshape(n_rows, intermediate // 128, 128)
    scale = np.maximum(np.abs(groups).max(-1), 1e-4) / 448
    np.testing.assert_allclose(scales[:, :n_rows], scale.T, rtol=1e-5)
    codes = (groups / scale[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).reshape(n_rows, intermediate)
    expected, got = codes.view(np.uint8).astype(int), out[:n_rows].astype(int)
    signed = [np.where(c & 0x80, -(c & 0x7F), c & 0x7F) for c in (expected, got)]
    assert np.abs(signed[0] - signed[1]).max(initial=0) <= 1
    assert (expected != got).sum() <= 0.01 * got.size
    assert (out[n_rows:] == POISON).all()
    assert (np.ascontiguousarray(scales[:, n_rows:]).view(np.uint8) == POISON).all()


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("n, n_rows, intermediate", [(12, 9, 8), (6, 6, 264), (40, 33, 64), (4, 0, 16), *ON_GPU])
def test_bf16_rows(n, n_rows, intermediate, limit):
    check_bf16(n, n_rows, intermediate, limit)


def test_large_numbers_infinities_and_nan():
    special = np.array(
        [0, -0.0, 1e-40, -1e-40, 80, -80, 100, -100, 1e30, -1e30, np.inf, -np.inf, np.nan, 7, 7.03, -7.03]
    )
    gate, up = np.meshgrid(special, special)
    rows = np.concatenate([gate, up], 1).astype(np.float32).astype(BF16)
    check_bf16(len(rows), len(rows), 16, None, rows)
    check_bf16(len(rows), len(rows), 16, LIMIT, rows)


def test_a_row_count_beyond_the_capacity_writes_nothing_behind_it():
    rows = random_rows(4, 8, seed=1)
    out, _ = run(config(), rows, 100, 8)
    assert out.shape == (4, 16) and not (out == POISON).all(1).any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"intermediate": 12}, "intermediate=12 must be a positive multiple of 8"),
        ({"intermediate": 0}, "intermediate=0 must be"),
        (
            {"intermediate": 192, "output_format": "fp8_blockwise"},
            "intermediate=192 must be a positive multiple of 128",
        ),
        ({"intermediate": 64, "output_format": "nvfp4"}, "output_format='nvfp4' must be one of bf16, fp8_blockwise"),
        ({"intermediate": 64, "limit": 0.0}, "limit=0.0 must be positive"),
        ({"intermediate": 64, "limit": 1.0, "alpha": float("nan")}, "alpha=nan finite"),
    ],
)
def test_refused(options, message):
    with pytest.raises(EPValueError, match=message):
        fused_silu_kernel(config(), **options)
