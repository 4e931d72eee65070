"""Results: capacity and exact rows, memory that is lent and taken back, arrays of the caller (out=), bytes."""

import gc

import numpy as np
import pytest
from worlds_at_hand import BF16, batch, combine, config, parallel, refused, same_bits

from epmoe import Dispatched, ExpertParallel
from epmoe.check import compare_dispatched_world


def test_arrays_have_capacity_and_trimmed_has_exact_rows():
    cfg = config(n_ranks=3, n_experts=6, top_k=3, max_tokens_per_rank=5)
    x, ids, _ = batch(cfg)
    with parallel(cfg) as ep:
        for d in ep.dispatch(x, ids):
            # n_ranks * max_tokens_per_rank * min(top_k, n_local_experts)
            assert ep.capacity == 3 * 5 * 2
            assert d.output_tokens.shape == (ep.capacity, 16)
            assert d.src_info.shape == (ep.capacity, 2)
            n = sum(((a // 2 == d.rank) & (a >= 0)).sum() for a in ids)
            cut = d.trimmed()
            assert d.n_rows == n and cut.src_info.shape == (n, 2)
            assert cut.output_tokens.shape == (n, 16) and cut.output_tokens.dtype == BF16
            assert cut.output_tokens.ctypes.data == d.output_tokens.ctypes.data, "no copy"
            assert d.recv_count.shape == (2, 3) and d.recv_count.sum() == n
            assert np.array_equal(d.topk_ids, ids[d.rank]) and d.num_tokens == len(x[d.rank])


@pytest.mark.parametrize(
    "token_format, columns", [("fp8_blockwise", 128), ("nvfp4", 64), ("mxfp4", 64), ("mxfp8", 128), ("mxfp4_rows", 64)]
)
def test_trimmed_cuts_scales_along_the_right_axis(token_format, columns):
    cfg = config(hidden=128, token_format=token_format, max_tokens_per_rank=3)
    x, ids, _ = batch(cfg)
    with parallel(cfg) as ep:
        for d in ep.dispatch(x, ids):
            cut = d.trimmed()
            assert cut.output_tokens.shape == (d.n_rows, columns)
            tiles = int((np.diff(d.row_offsets.astype(int)) > 0).sum())
            shape = dict(fp8_blockwise=(1, d.n_rows), mxfp4_rows=(d.n_rows, 4))
            tiled = tiles, 2 if token_format == "nvfp4" else 1, 32, 4, 4
            assert cut.output_scales.shape == shape.get(token_format, tiled)


def test_memory_is_lent_until_the_last_array_is_gone():
    cfg = config(n_ranks=1, max_tokens_per_rank=2)
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:

        def round_of():
            d = ep.dispatch(x, ids)
            return [a.output_tokens[:2] for a in d], combine(ep, d, weights)

        round_of()
        gc.collect()
        held = ep.memory().allocated_bytes
        for _ in range(2):
            round_of()
            gc.collect()
        assert ep.memory().allocated_bytes == held, "a steady state allocates nothing"
        first = round_of()
        copies = [a.copy() for part in first for a in part]
        second = round_of()
        assert ep.memory().allocated_bytes > held
        assert same_bits(sum(first, []), copies), "kept arrays keep their values"
    assert same_bits(second[1], first[1]), "and outlive the ExpertParallel"


def test_results_go_into_arrays_of_the_caller(ep, x, ids, weights):
    tokens = [np.zeros((ep.capacity, 16), BF16) for _ in range(2)]
    offsets = [np.zeros(3, np.uint32) for _ in range(2)]
    into = [Dispatched(t, None, None, o, *[None] * 4, 0) for t, o in zip(tokens, offsets)]
    d = ep.dispatch(x, ids, out=into)
    for a, t, o in zip(d, tokens, offsets):
        assert a.output_tokens is t and a.row_offsets is o
    outs = [np.zeros((len(a), 16), BF16) for a in x]
    given = ep.combine(tokens, d, weights, out=outs)
    assert all(a is b for a, b in zip(given, outs))
    fresh = ep.dispatch(x, ids)
    assert not compare_dispatched_world(ep.cfg, d, fresh)
    assert same_bits(outs, combine(ep, fresh, weights))
    assert any(a.any() for a in outs)


def test_wrong_arrays_of_the_caller_are_refused(ep, x, ids, weights):
    short = [Dispatched(np.zeros((3, 16), BF16), *[None] * 7, 0)] * 2
    with refused(ep, r"out: output_tokens of rank 0 is bfloat16 \(3, 16\)"):
        ep.dispatch(x, ids, out=short)
    scales = [Dispatched(None, np.zeros(1, np.float32), *[None] * 6, 0)] * 2
    with refused(ep, "output_scales.*'bf16' does not produce"):
        ep.dispatch(x, ids, out=scales)
    d = ep.dispatch(x, ids, out=None)
    with refused(ep, "out: output_tokens of rank 0 is float32"):
        combine(ep, d, weights, out=[np.zeros((len(a), 16), np.float32) for a in x])
    frozen = [np.zeros((len(a), 16), BF16) for a in x]
    frozen[1].flags.writeable = False
    with refused(ep, "rank 1 is read-only"):
        combine(ep, d, weights, out=frozen)
    combine(ep, d, weights)


def test_memory_is_planned_before_and_counted_after(ep, x, ids, weights):
    plan = ExpertParallel.plan(ep.cfg)
    rows = {row.buffer: row for row in plan}
    message = 32 + 16 + 16  # payload, src_info and topk_info, each padded to 16 bytes
    assert rows["dispatch_recv_buf"].planned_bytes == 2 * 2 * 4 * message
    assert rows["dispatch_recv_count"].planned_bytes == 2 * 2 * 8
    assert rows["combine_recv_buf"].planned_bytes == 4 * 2 * 32
    assert rows["ep_counters"].planned_bytes == 4 * (8 * 4 + 12)
    assert plan.allocated_bytes == 0 and plan.planned_bytes > 0 and "allocated" not in str(plan)
    assert {row.buffer for row in ep.memory()} >= set(rows)
    assert ep.memory().planned_bytes == plan.planned_bytes
    d = ep.dispatch(x, ids)
    combine(ep, d, weights)
    ep.fused_silu([np.zeros((one.n_rows, 2048), BF16) for one in d], d)
    used = {row.buffer: row.allocated_bytes for row in ep.memory()}
    assert used["SwiGLU result"] > 0
    assert used["dispatch result"] == rows["dispatch result"].planned_bytes
    assert used["unreduced combine result"] == 0
    lines = str(ep.memory()).splitlines()
    assert lines[0].split() == ["bytes", "of", "one", "rank", "planned", "allocated"]
    assert lines[-1].startswith("total")


def test_the_reference_sorts_the_kernels_rows():
    """epmoe_ref.canonical takes a trimmed Dispatched of epmoe: two schedules differ before it and agree after it."""
    import epmoe_ref

    cfg = config(max_tokens_per_rank=8)
    x, ids, _ = batch(cfg)
    sorted_rows = []
    for seed in (1, 2):
        with parallel(cfg, seed=seed) as ep:
            sorted_rows.append([epmoe_ref.canonical(d.trimmed()) for d in ep.dispatch(x, ids)])
    for a, b, want in zip(*sorted_rows, epmoe_ref.dispatch(cfg, x, ids)):
        assert np.array_equal(a.src_info, b.src_info) and np.array_equal(a.src_info, want.src_info)
        assert np.array_equal(a.output_tokens.view(np.uint16), want.output_tokens.view(np.uint16))
