"""Laws of fused_a2a on the device: what dispatch and combine are to each other, and what no result depends on."""

import numpy as np
import pytest
from rows_group import BF16, FP32, assert_same, group_of, host, inner, integers, routing, tokens

from epmoe import fused_a2a

NUM_TOKENS, NUM_EXPERTS, TOP_K, HIDDEN = (6, 0, 5), 6, 3, 16
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def rows_round(group, x, ids, probs, **flags):
    """All results of one forward and backward of FusedDispatch and FusedCombine, as NumPy."""
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    recv_x, indices, recv_probs, per_expert, handle = fused_a2a.FusedDispatch.forward(
        ctx, x, ids, probs, NUM_EXPERTS, group, **flags
    )
    combined, _ = fused_a2a.FusedCombine.forward(other, recv_x, group, handle, **flags)
    back = fused_a2a.FusedCombine.backward(other, combined)[0]
    grads = fused_a2a.FusedDispatch.backward(ctx, back, None, recv_probs, None, None)
    return host([recv_x, indices, recv_probs, per_expert, combined, back, grads[0], grads[2]])


def hybrid_round(group, x, maps, probs, **options):
    """All results of one forward and backward of HybridEPDispatch and HybridEPCombine, as NumPy."""
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    hidden, row_probs, _, per_expert, handle = fused_a2a.HybridEPDispatch.forward(
        ctx, x, maps, probs, group, 2, **options
    )
    combined = fused_a2a.HybridEPCombine.forward(other, hidden, handle)
    back = fused_a2a.HybridEPCombine.backward(other, combined)[0]
    grads = fused_a2a.HybridEPDispatch.backward(ctx, back, row_probs, None, None, None)
    return host([hidden, row_probs, per_expert, combined, back, grads[0], grads[2]])


def test_combine_of_dispatch_multiplies_by_the_number_of_ranks(rng):
    ids, probs = routing(rng, NUM_TOKENS, NUM_EXPERTS, TOP_K)
    x = integers(rng, NUM_TOKENS, HIDDEN)
    combined, grad_probs = (rows_round(group_of(3), x, ids, probs)[i] for i in (4, 7))
    for out, own, slots, got, given in zip(combined, x, ids, grad_probs, probs):
        ranks = np.array([len({e // 2 for e in token if e >= 0}) for token in slots]).reshape(-1, 1)
        assert_same(out, (own.astype(FP32) * ranks).astype(BF16), "combined")
        assert_same(got, np.where(slots >= 0, given, FP32.type(0)), "probs there and back")


def test_combine_of_expert_rows_multiplies_by_the_number_of_experts(rng):
    maps = [rng.random((n, NUM_EXPERTS)) < 0.5 for n in NUM_TOKENS]
    probs = [rng.random(m.shape, np.float32) for m in maps]
    x = integers(rng, NUM_TOKENS, HIDDEN)
    results = hybrid_round(group_of(3), x, maps, probs, pad_multiple=4)
    for out, own, routed, got, given in zip(results[3], x, maps, results[6], probs):
        assert_same(
            out, (own.astype(FP32) * routed.sum(axis=1, keepdims=True)).astype(BF16), "combined"
        )
        assert_same(got, np.where(routed, given, FP32.type(0)), "probs there and back")


def test_backward_is_the_adjoint_of_forward(rng):
    ids, _ = routing(rng, NUM_TOKENS, NUM_EXPERTS, TOP_K)
    x, probs = integers(rng, NUM_TOKENS, HIDDEN), integers(rng, NUM_TOKENS, TOP_K, FP32)
    probs = [np.where(a < 0, 0, b).astype(FP32) for a, b in zip(ids, probs)]
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    group = group_of(3)
    recv_x, indices, recv_probs, _, handle = fused_a2a.FusedDispatch.forward(
        ctx, x, ids, probs, NUM_EXPERTS, group
    )
    g = integers(rng, [len(a) for a in host(recv_x)], HIDDEN)
    masked = [
        np.where(host(a) >= 0, b, 0).astype(FP32)
        for a, b in zip(indices, integers(rng, [len(a) for a in g], TOP_K, FP32))
    ]
    grads = fused_a2a.FusedDispatch.backward(ctx, g, None, masked, None, None)
    assert inner(recv_x, g) == inner(x, grads[0]) and inner(recv_probs, masked) == inner(
        probs, grads[2]
    )
    combined, _ = fused_a2a.FusedCombine.forward(other, g, group, handle)
    assert inner(combined, x) == inner(g, fused_a2a.FusedCombine.backward(other, x)[0])


def test_backward_of_expert_rows_is_the_adjoint_of_forward(rng):
    maps = [rng.random((n, NUM_EXPERTS)) < 0.5 for n in NUM_TOKENS]
    x = integers(rng, NUM_TOKENS, HIDDEN)
    probs = [
        np.where(m, p, 0).astype(FP32)
        for m, p in zip(maps, integers(rng, NUM_TOKENS, NUM_EXPERTS, FP32))
    ]
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    # a budget that is too small: dropped rows take no part in either direction
    hidden, row_probs, _, per_expert, handle = fused_a2a.HybridEPDispatch.forward(
        ctx, x, maps, probs, group_of(3), 2, num_permuted_tokens=7, pad_multiple=2
    )
    assert [int(host(a)[0]) for a in handle.overflow].count(1) >= 1
    assert [int(host(n).sum()) for n in per_expert] <= [7] * 3
    g, gp = integers(rng, [7] * 3, HIDDEN), [a[:, 0] for a in integers(rng, [7] * 3, 1, FP32)]
    grads = fused_a2a.HybridEPDispatch.backward(ctx, g, gp, None, None, None)
    assert inner(hidden, g) == inner(x, grads[0]) and inner(row_probs, gp) == inner(probs, grads[2])
    combined = fused_a2a.HybridEPCombine.forward(other, g, handle)
    assert inner(combined, x) == inner(g, fused_a2a.HybridEPCombine.backward(other, x)[0])


@pytest.fixture(scope="module")
def expected():
    """One world of data and its results, which the options below must not change by a bit."""
    rng = np.random.default_rng(12)
    ids, probs = routing(rng, NUM_TOKENS, NUM_EXPERTS, TOP_K)
    maps = [rng.random((n, NUM_EXPERTS)) < 0.5 for n in NUM_TOKENS]
    x, dense = tokens(rng, NUM_TOKENS, HIDDEN), [rng.random(m.shape, np.float32) for m in maps]
    group = group_of(3)
    return (
        (x, ids, probs),
        rows_round(group, x, ids, probs),
        (x, maps, dense),
        hybrid_round(group, x, maps, dense),
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sms, threads, seed", [(2, 64, None), (3, 32, 3), (5, 96, 4)])
def test_no_bit_depends_on_sms_threads_or_the_schedule(expected, sms, threads, seed):
    rows, rows_results, hybrid, hybrid_results = expected
    group = group_of(3, n_sms=sms, num_threads=threads, seed=seed)
    fused_a2a.set_deepep_num_sms(1 if seed is None else sms)
    try:
        assert_same(rows_round(group, *rows), rows_results, "rows")
    finally:
        fused_a2a.set_deepep_num_sms(None)
    sms = dict(num_sms_dispatch_api=sms, num_sms_combine_api=1)
    assert_same(hybrid_round(group, *hybrid, **sms), hybrid_results, "rows by expert")


@pytest.mark.parametrize(
    "flags",
    [dict(async_finish=True), dict(async_finish=True, allocate_on_comm_stream=True)],
    ids=str,
)
def test_no_bit_depends_on_async_flags(expected, flags):
    assert_same(rows_round(group_of(3), *expected[0], **flags), expected[1], "rows")


def test_no_bit_depends_on_what_a_rank_knows_of_the_others(expected):
    """The first dispatch finds no room on any rank, and everybody sends again; results are the same."""
    rows, rows_results, hybrid, hybrid_results = expected
    group = group_of(3, knows_all_ranks=False)
    assert_same(rows_round(group, *rows), rows_results, "rows")
    assert_same(hybrid_round(group, *hybrid), hybrid_results, "rows by expert")
    group = group_of(3, knows_all_ranks=False)
    assert_same(
        hybrid_round(group, *hybrid, num_permuted_tokens=20)[3],
        hybrid_results[3],
        "combined, P given",
    )
