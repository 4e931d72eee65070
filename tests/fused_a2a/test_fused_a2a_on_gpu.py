"""fused_a2a on a GPU that all ranks of a LocalWorld share: the reference's results, device arrays, graphs."""

import importlib.util

import numpy as np
import pytest
from against_reference import equal_hybrid, equal_rows
from hypothesis import given
from hypothesis import strategies as st
from rows_group import BF16, FP16, FP32, OneRank, assert_same, fp8_pairs, group_of, host, law, routing, tokens

from epmoe import LocalWorld, fused_a2a
from epmoe_ref import fused_a2a as reference
from epmoe_ref import strategies
from epmoe_ref.strategies import HybridWorld, RowsWorld

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch makes the device arrays")


# one shape, since each compiles kernels; in the simulator all sorts run
RANKS, LOCAL, TOP_K, HIDDEN = 3, 2, 3, 16


@st.composite
def rows_worlds(draw):
    """As strategies.rows_worlds, of one shape."""
    num_tokens = draw(strategies.num_tokens(RANKS))
    ids = [draw(strategies.topk_ids(n, RANKS * LOCAL, TOP_K, RANKS, np.int64)) for n in num_tokens]
    probs = draw(strategies.matrices(num_tokens, TOP_K, np.float32, ("normal",)))
    return RowsWorld(draw(strategies.matrices(num_tokens, HIDDEN)), ids, probs, RANKS * LOCAL)


@st.composite
def hybrid_worlds(draw):
    """As strategies.hybrid_worlds, of one shape."""
    num_tokens = draw(strategies.num_tokens(RANKS))
    maps = [draw(strategies.routing_maps(n, RANKS * LOCAL, RANKS)) for n in num_tokens]
    probs = draw(strategies.matrices(num_tokens, RANKS * LOCAL, np.float32, ("normal",)))
    pad, enough = draw(st.sampled_from((None, 1, 3, 128))), LOCAL * sum(num_tokens)
    budget = draw(st.one_of(st.none(), st.integers(0, enough + 8)))
    return HybridWorld(draw(strategies.matrices(num_tokens, HIDDEN)), maps, probs, LOCAL, budget, pad, False, None)


@law
@given(rows_worlds(), st.sampled_from((BF16, FP16, FP32)), strategies.seeds())
def test_rows_are_the_references(world, dtype, seed):
    equal_rows(group_of(RANKS), world, np.random.default_rng(seed), dtype, HIDDEN)


@law
@given(hybrid_worlds(), st.sampled_from((BF16, FP16)), strategies.seeds())
def test_rows_by_expert_are_the_references(world, dtype, seed):
    equal_hybrid(group_of(RANKS), world, np.random.default_rng(seed), dtype, HIDDEN)


@pytest.mark.parametrize("num_tokens", [(1, 0, 2, 1), (128, 128, 100, 128), (700, 1024, 0, 512)], ids=str)
@pytest.mark.parametrize("hidden", [7168, 4096])
def test_large_worlds(num_tokens, hidden):
    rng, group = np.random.default_rng(1), group_of(4)
    ids, probs = routing(rng, num_tokens, 256, 8, dropped=0.02)
    for _ in range(2):
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, hidden), ids, probs, 256), rng, hidden=hidden)
    maps = [(a[:, :, None] == np.arange(256)).any(axis=1) for a in ids]
    dense = [rng.random(m.shape, np.float32) for m in maps]
    for budget, fp8 in ((None, False), (9000, True)):
        equal_hybrid(
            group, HybridWorld(tokens(rng, num_tokens, hidden), maps, dense, 64, budget, 16, fp8, 2), rng, hidden=hidden
        )


def on_gpu(array):
    """The array in torch's GPU memory."""
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


@needs_torch
def test_device_arrays_go_in_and_bad_ids_are_told_afterwards():
    rng, group = np.random.default_rng(2), group_of(2)
    ids, probs = routing(rng, (9, 7), 4, 2)
    x = tokens(rng, (9, 7), 64)
    bad = [a.copy() for a in ids]
    bad[1][3], ids[1][3] = (2**40, 4), -1
    given_x, given_probs = [on_gpu(a) for a in x], [on_gpu(a) for a in probs]
    with pytest.raises(ValueError, match="rank 1: token_indices"):
        fused_a2a.fused_dispatch(given_x, [on_gpu(a) for a in bad], given_probs, 4, group)
    *want, known = reference.dispatch_forward(x, ids, probs, 4)
    *got, handle = fused_a2a.fused_dispatch(given_x, [on_gpu(a) for a in ids], given_probs, 4, group)
    for one, other in zip(got, want):
        assert_same(one, other, "dispatch")
    combined, _ = fused_a2a.fused_combine(got[0], group, handle)
    assert_same(combined, reference.combine_forward(want[0], known), "combine of dispatch's own arrays")


@needs_torch
def test_a_call_that_the_host_waits_for_copies_nothing_and_synchronises_with_nothing(monkeypatch):
    from cuda.bindings import driver

    rng, group = np.random.default_rng(6), OneRank(LocalWorld(1))
    (x,), ((ids,), (probs,)) = tokens(rng, (40,), 512), routing(rng, (40,), 16, 4)
    maps = rng.random((40, 16)) < 0.3
    given, given_maps = [on_gpu(a) for a in (x, ids, probs)], on_gpu(maps)
    *want, _ = reference.dispatch_forward([x], [ids], [probs], 16)
    *by_expert, _ = reference.hybrid_dispatch_forward([x], [maps], None, 16)

    def both():
        *rows, _ = fused_a2a.fused_dispatch(*given, 16, group)
        *experts, _ = fused_a2a.hybrid_ep_dispatch(given[0], given_maps, None, group, 16)
        return rows, experts

    both(), both()
    waits = []
    for name in ("cuStreamSynchronize", "cuCtxSynchronize", "cuMemcpyDtoHAsync"):
        call = getattr(driver, name)
        monkeypatch.setattr(driver, name, lambda *a, name=name, call=call: waits.append(name) or call(*a))
    made = [both() for _ in range(20)]
    assert not waits
    made[0][0][0].numpy()
    assert waits, "calls are counted"
    for rows, experts in made:
        for got, one in zip(rows, want):
            assert_same([got], one, "rows")
        for got, one in zip(experts, by_expert):
            assert got is None or not assert_same([got], one, "rows by expert")


def test_many_rounds_take_no_more_memory():
    rng, group = np.random.default_rng(3), group_of(4)
    ids, probs = routing(rng, (64,) * 4, 16, 4)
    x, maps = tokens(rng, (64,) * 4, 256), [rng.random((64, 16)) < 0.3 for _ in range(4)]
    first = None
    for number in range(1000):
        recv_x, *_, handle = fused_a2a.fused_dispatch(x, ids, probs, 16, group)
        combined, _ = fused_a2a.fused_combine(recv_x, group, handle)
        hidden, *_, handle = fused_a2a.hybrid_ep_dispatch(x, maps, None, group, 4, num_permuted_tokens=600)
        back = fused_a2a.hybrid_ep_combine(hidden, handle)
        if number % 250 == 10:
            buffers = [fused_a2a.get_buffer(group, 0), fused_a2a.buffers.hybrid_ep_buffer(group)]
            now = [b.allocated_bytes for b in buffers], host(combined), host(back)
            first = first or now
            assert now[0] == first[0]
            assert_same(now[1:], first[1:], f"round {number}")


def test_blockwise_fp8_travels_as_a_pair():
    rng = np.random.default_rng(4)
    ids, probs = routing(rng, (60, 31), 16, 4)
    equal_rows(group_of(2), RowsWorld(fp8_pairs(rng, (60, 31), 7168), ids, probs, 16), rng)


@needs_torch
def test_a_graph_of_forward_and_backward_runs_again_with_new_data():
    """num_permuted_tokens given: nothing waits, nothing is allocated; one rank, whose stream torch captures."""
    import torch

    rng, stream = np.random.default_rng(5), torch.cuda.Stream()
    group = OneRank(LocalWorld(1, stream=stream))
    maps = [rng.random((40, 8)) < 0.4 for _ in range(3)]
    x = [tokens(rng, (40,), 512)[0] for _ in range(3)]
    probs = [rng.random(m.shape, np.float32) for m in maps]
    given = [on_gpu(x[0]), on_gpu(maps[0]), on_gpu(probs[0])]

    def step():
        ctx, other = fused_a2a.Context(), fused_a2a.Context()
        hidden, row_probs, _, per_expert, handle = fused_a2a.HybridEPDispatch.forward(
            ctx, given[0], given[1], given[2], group, 8, num_permuted_tokens=200, pad_multiple=4
        )
        out = fused_a2a.HybridEPCombine.forward(other, hidden, handle)
        back = fused_a2a.HybridEPCombine.backward(other, out)[0]
        grads = fused_a2a.HybridEPDispatch.backward(ctx, back, row_probs, None, None, None)
        return hidden, row_probs, per_expert, out, grads[0], grads[2], handle

    fused_a2a.init_hybrid_ep_buffer(group, 512, 40, 8, 24, 24, False)
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = step()
    for own_x, own_map, own_probs in zip(x, maps, probs):
        for array, new in zip(given, (own_x, own_map, own_probs)):
            array.copy_(on_gpu(new))
        graph.replay()
        torch.cuda.synchronize()
        hidden, row_probs, _, per_expert, known = reference.hybrid_dispatch_forward(
            [own_x], [own_map], [own_probs], 8, num_permuted_tokens=200, pad_multiple=4
        )
        out = reference.hybrid_combine_forward(hidden, known)
        grads = reference.hybrid_dispatch_backward(known, reference.hybrid_combine_backward(known, out), row_probs)
        for got, want in zip(results, (hidden, row_probs, per_expert, out, *grads)):
            assert_same([got], want, "replayed")
