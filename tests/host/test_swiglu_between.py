"""fused_silu between dispatch and combine: rows whose number the host does not ask for, against the reference."""

import numpy as np
import pytest
from worlds_at_hand import BF16, batch, config, parallel, refused

import epmoe_ref

WIDTH = 128


def ordered(a):
    """Floats of 8 or 16 bits as integers in the order of their values, so that neighbours differ by 1."""
    bits, sign = a.view(f"u{a.itemsize}").astype(np.int32), 0x80 << 8 * (a.itemsize - 1)
    return np.where(bits & sign, sign - bits, bits)


def gate_up_rows(rank, rows):
    return (np.random.default_rng(rank).standard_normal((rows, 2 * WIDTH)) * 3).astype(BF16)


@pytest.mark.parametrize("capacity_rows", [False, True], ids=["exact rows", "capacity rows"])
@pytest.mark.parametrize("variant", [dict(), dict(limit=2.0, alpha=1.5)], ids=["plain", "clamped"])
@pytest.mark.parametrize("token_format", ["bf16", "fp8_blockwise"])
@pytest.mark.by_day(1)
def test_rows_agree_with_the_reference(token_format, variant, capacity_rows):
    cfg = config(hidden=128, token_format=token_format)
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)
        gate_up = [gate_up_rows(r, ep.capacity if capacity_rows else of.n_rows) for r, of in enumerate(d)]
        plain = ep.fused_silu(gate_up, d, **variant)
        quantised = ep.fused_silu(gate_up, d, output_format="fp8_blockwise", **variant)
        for rank, of in enumerate(d):
            n, offsets = of.n_rows, np.asarray(of.row_offsets)
            want = epmoe_ref.fused_silu(gate_up[rank], offsets, **variant)
            assert plain[rank].dtype == BF16 and len(plain[rank]) == len(gate_up[rank])
            assert np.abs(ordered(plain[rank][:n]) - ordered(want)).max(initial=0) <= 1
            codes, scales = epmoe_ref.fused_silu_fp8(gate_up[rank], offsets, **variant)
            got, got_scales = quantised[rank]
            assert got_scales.shape == (WIDTH // 128, len(gate_up[rank]))
            np.testing.assert_allclose(got_scales[:, :n], scales, rtol=2e-7)
            assert np.abs(ordered(got[:n]) - ordered(codes)).max(initial=0) <= 1
        ep.combine([np.zeros((ep.capacity, 128), BF16)] * cfg.n_ranks, d, weights)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(output_format="nvfp4"), "output_format='nvfp4' must be one of bf16, fp8_blockwise"),
        (dict(output_format=["bf16"]), r"cannot take .*'output_format': \['bf16'\].*unhashable"),
        (dict(limit="x"), "cannot take .*'limit': 'x'"),
        (dict(limit=-1.0), "limit=-1.0 must be positive"),
        (dict(rows=gate_up_rows(0, 17)), "rows; one is needed for each"),
        (dict(rows=gate_up_rows(0, 16).astype(np.float32)), "bfloat16 is needed"),
        (dict(rows=gate_up_rows(0, 16)[:, :-1]), r"2 \* width"),
    ],
    ids=["a format", "a list", "a str", "a limit", "more rows", "float32", "an odd width"],
)
def test_unknown_variants_and_rows_of_another_number_or_type_are_refused(change, said):
    options = dict(rows=gate_up_rows(0, 16)) | change
    cfg = config(hidden=128)
    with parallel(cfg) as ep:
        assert ep.capacity == 16
        d = ep.dispatch(*batch(cfg)[:2])
        rows = [gate_up_rows(0, 16), options.pop("rows")]
        with refused(ep, said):
            ep.fused_silu(rows, d, **options)
        with parallel(cfg) as other, refused(ep, "rank 0 was given a Dispatched: it needs that"):
            ep.fused_silu(rows, other.dispatch(*batch(cfg)[:2]))
