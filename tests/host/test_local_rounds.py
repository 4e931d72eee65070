"""Rounds of a LocalWorld are the reference's rounds, bit for bit: sizes, seeds, split and fused, options."""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import worlds_at_hand
from worlds_at_hand import BF16, batch, config, equal_dispatch

import epmoe_ref
from epmoe import LaunchConfig, LocalWorld, fma_rn, mul_rn
from epmoe.check import compare_combined_world, compare_dispatched_world, report
from epmoe.expert_parallel import ExpertParallel

parallel = partial(worlds_at_hand.parallel, launch=None)  # as users get it

SIZES = [
    dict(n_ranks=1, n_experts=1, top_k=1, hidden=8, max_tokens_per_rank=1),
    dict(n_ranks=1, n_experts=8, top_k=8, hidden=24, max_tokens_per_rank=7),
    dict(n_ranks=2, n_experts=2, top_k=2, hidden=40, max_tokens_per_rank=9),
    dict(n_ranks=3, n_experts=9, top_k=4, hidden=64, max_tokens_per_rank=6),
    dict(n_ranks=4, n_experts=64, top_k=8, hidden=8, max_tokens_per_rank=3),
    dict(n_ranks=2, n_experts=40, top_k=32, hidden=16, max_tokens_per_rank=2),
    dict(n_ranks=2, n_experts=6, top_k=3, hidden=520, max_tokens_per_rank=5),
    dict(n_ranks=5, n_experts=5, top_k=2, hidden=16, max_tokens_per_rank=4),
]


def scaled_rows(d, factor):
    """Expert outputs that depend on the expert: rows of group g times factor + g, in bf16."""
    y = []
    for of_rank in d:
        offsets = np.asarray(of_rank.row_offsets).astype(np.int64)
        rows = np.asarray(of_rank.output_tokens)[: offsets[-1]].astype(np.float32)
        group = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        y.append((rows * (factor + group)[:, None]).astype(BF16))
    return y


def check_round(ep, cfg, x, ids, dtype=BF16, **options):
    """One round against the reference; options go to both combines. dtype: of the experts' outputs."""
    d = ep.dispatch(x, ids)
    want = equal_dispatch(cfg, d, x, ids)
    y, y_want = ([a.astype(dtype) for a in scaled_rows(of, 0.5)] for of in (d, want))
    out = ep.combine(y, d, **options)
    expected = epmoe_ref.combine(cfg, y_want, want, **options)
    found = compare_combined_world(cfg, out, expected)
    assert not found, report(found)
    return d, out


@pytest.mark.by_day(4)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(map(str, s.values())))
def test_rounds_equal_the_reference(sizes, kernels, fused):
    cfg = config(**sizes)
    with parallel(cfg, kernels=kernels, fused=fused, seed=len(SIZES) * fused) as ep:
        for number in range(2):
            rng, most = np.random.default_rng(number), cfg.max_tokens_per_rank
            x, ids, weights = batch(cfg, number, list(rng.integers(0, most + 1, cfg.n_ranks)))
            check_round(ep, cfg, x, ids, router_weights=weights)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4, 5])
def test_results_do_not_depend_on_the_schedule(seed):
    cfg = config(n_ranks=3, n_experts=6, top_k=3, max_tokens_per_rank=5)
    x, ids, weights = batch(cfg, 7)
    with parallel(cfg, seed=seed) as ep:
        for _ in range(2):
            check_round(ep, cfg, x, ids, router_weights=weights)


def test_split_calls_place_each_array_once():
    cfg = config()
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        placing = ep._engine.placing
        with patch.object(placing, "place", wraps=placing.place) as place:
            ep.dispatch_async(x, ids)
            d = ep.dispatch_wait()
            ep.combine_async(scaled_rows(d, 1), d)
            ep.combine_wait(weights)
    names = [call.args[1] for call in place.call_args_list]
    of_rank = ["input_tokens", "topk_ids", "expert_outputs", "router_weights"]
    assert sorted(names) == sorted(of_rank * cfg.n_ranks)


def test_no_tokens_at_all():
    cfg = config()
    with parallel(cfg) as ep:
        x, ids, weights = batch(cfg, num_tokens=[0, 0])
        d, out = check_round(ep, cfg, x, ids, router_weights=weights)
        assert [a.n_rows for a in d] == [0, 0] and [a.shape for a in out] == [(0, 16), (0, 16)]


def test_every_slot_empty_gives_zeros():
    cfg = config()
    x, ids, weights = batch(cfg)
    # a weight of an empty slot adds nothing, whatever it is
    nan = [np.full_like(w, np.nan) for w in weights]
    with parallel(cfg) as ep:
        _, out = check_round(ep, cfg, x, [np.full_like(a, -1) for a in ids], router_weights=nan)
        assert all((a.view(np.uint16) == 0).all() for a in out)


def test_one_hot_expert():
    cfg = config(n_ranks=3, n_experts=6, top_k=2, max_tokens_per_rank=8)
    x, ids, weights = batch(cfg, num_tokens=[8, 8, 8])
    hot = [np.tile(np.array([5, -1]), (8, 1)) for _ in range(3)]
    with parallel(cfg) as ep:
        d, _ = check_round(ep, cfg, x, hot, router_weights=weights)
        assert d[2].recv_count.tolist() == [[0, 0, 0], [8, 8, 8]]


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_without_weights_the_rows_come_back_unreduced(fused):
    cfg = config()
    x, ids, _ = batch(cfg)
    with parallel(cfg, fused=fused) as ep:
        _, out = check_round(ep, cfg, x, ids)
        assert out[0].shape == (4, 2, 16)


def weight_of(token, k, table, factor):
    return mul_rn(table[token, k], factor)


def shifted(token, col, value, bias, factor):
    return fma_rn(value, factor, bias[col])


@pytest.mark.parametrize("combine_dtype", ["bf16", "fp16", "fp32"])
def test_functions_run_in_the_kernel_as_in_numpy(combine_dtype):
    cfg = config(combine_dtype=combine_dtype)
    x, ids, weights = batch(cfg)
    bias = np.linspace(-2, 2, cfg.hidden, dtype=np.float32)
    options = dict(
        router_weights=weight_of, router_weights_args=(weights, 0.75), epilogue=shifted, epilogue_args=(bias, 3.0)
    )
    dtype = {"bf16": BF16, "fp16": np.float16, "fp32": np.float32}[combine_dtype]
    with parallel(cfg) as ep:
        check_round(ep, cfg, x, ids, dtype, **options)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("skip_a2a", [False, True], ids=["a2a", "skip_a2a"])
def test_a_shared_expert_takes_the_ranks_own_tokens(fused, skip_a2a):
    cfg = config(fused_shared_expert=True, skip_a2a=skip_a2a, allreduce_world_size=2 if skip_a2a else 1)
    x, ids, weights = batch(cfg)
    if skip_a2a:
        x, ids, weights = ([a[0]] * 2 for a in (x, ids, weights))
    with parallel(cfg, fused=fused) as ep:
        for _ in range(2):
            check_round(ep, cfg, x, ids, router_weights=weights)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("token_format", ["fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"])
def test_every_format_equals_the_reference(token_format):
    cfg = config(n_ranks=2, hidden=128, token_format=token_format, max_tokens_per_rank=3)
    x, ids, _ = batch(cfg)
    with parallel(cfg) as ep:
        for scale in (1.0, [0.5, 3.0]):
            d = ep.dispatch(x, ids, input_scale=scale)
            want = equal_dispatch(cfg, d, x, ids, input_scale=scale)
            found = compare_dispatched_world(cfg, d, want)
            assert not found, "the arrays with capacity hold the same"
            ep.combine([np.zeros((ep.capacity, 128), BF16)] * 2, d)


@pytest.mark.parametrize(
    "launch", [LaunchConfig(n_sms=2, num_threads=32), LaunchConfig(n_sms=5, num_threads=96)], ids=str
)
def test_results_do_not_depend_on_the_launch(launch):
    cfg = config(n_ranks=2, n_experts=4, max_tokens_per_rank=6)
    x, ids, weights = batch(cfg)
    with parallel(cfg, launch=launch) as ep:
        check_round(ep, cfg, x, ids, router_weights=weights)


def test_two_worlds_beside_each_other():
    cfg = config()
    x, ids, weights = batch(cfg)
    with ExpertParallel(cfg, LocalWorld(2)) as a, ExpertParallel(cfg, LocalWorld(2)) as b:
        da, db = a.dispatch(x, ids), b.dispatch(x, ids)
        outs = [ep.combine(scaled_rows(d, 1), d, weights) for ep, d in ((b, db), (a, da))]
    assert all(np.array_equal(p, q) for p, q in zip(*outs))
