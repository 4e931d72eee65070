"""Gradients through torch.autograd are the reference's backward, exact on small integers."""

import numpy as np
import pytest
import torch
from small_tensors import DEVICE, array, assert_same, group_of, indices, integers, leaves

from epmoe.torch import (
    FusedCombine,
    FusedDispatch,
    fused_combine,
    fused_dispatch,
    fused_dispatch_on_device,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
    over_ranks,
)
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPValueError

WORLDS = {  # tokens of each rank, experts, slots, hidden
    "uneven": ((3, 5), 4, 2, 16),
    "an empty rank, K = E": ((4, 0, 2), 3, 3, 8),
}
pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.parametrize("sizes", WORLDS.values(), ids=list(WORLDS))]


def seeded(grads, results):
    """Gradients of results [of ranks], as whole numbers."""
    return [torch.from_numpy(g).to(DEVICE, r.dtype) for g, r in zip(grads, results)]


def rows_world(sizes):
    num_tokens, num_experts, top_k, hidden = sizes
    rng = np.random.default_rng(1)
    x, probs = (
        leaves(integers(rng, [(n, width) for n in num_tokens]), dtype)
        for width, dtype in ((hidden, torch.bfloat16), (top_k, torch.float32))
    )
    return rng, group_of(len(num_tokens)), x, indices(rng, num_tokens, num_experts, top_k), probs


def test_dispatch_has_the_references_gradients(sizes):
    """Without a wait of the host there are rows behind those that hold tokens. Their gradients, NaN, are not read."""
    for dispatch in fused_dispatch, fused_dispatch_on_device:
        rng, group, x, ids, probs = rows_world(sizes)
        recv_x, recv_ids, recv_probs, per_expert, _ = dispatch(x, ids, probs, sizes[1], group)
        made, known = reference_rows(x, ids, probs, sizes[1])
        for results, wanted in zip((recv_x, recv_ids, recv_probs), made):
            assert_same([r[: len(w)] for r, w in zip(results, wanted)], wanted, "the rows that hold tokens")
        assert_same([n.cpu() for n in per_expert], made[3], "tokens per expert")
        grads = [[np.full(r.shape, np.nan, np.float32) for r in results] for results in (recv_x, recv_probs)]
        for of_kind, shapes in zip(grads, ((w.shape for w in made[0]), (w.shape for w in made[2]))):
            for grad, some in zip(of_kind, integers(rng, shapes)):
                grad[: len(some)] = some
        grads = [seeded(of_kind, results) for of_kind, results in zip(grads, (recv_x, recv_probs))]
        torch.autograd.backward([*recv_x, *recv_probs], [*grads[0], *grads[1]])
        cut = [[g[: len(w)] for g, w in zip(array(of_kind), made[0])] for of_kind in grads]
        wanted = reference.dispatch_backward(known, *cut)
        assert_same([t.grad for t in x], wanted[0], "gradient of x")
        assert_same([t.grad for t in probs], wanted[1], "gradient of probs")


def test_masked_rows_give_experts_the_same_gradients_without_a_wait_of_the_host(sizes):
    """The mask is the one of docs/torch.md; rows behind the first N, and their gradients, hold anything."""
    (_, group, x, ids, probs), found = rows_world(sizes), []
    for dispatch in fused_dispatch, fused_dispatch_on_device:
        rows, *_, handle = dispatch(x, ids, probs, sizes[1], group)
        scales = [torch.arange(1.0, t.shape[1] + 1, device=DEVICE).requires_grad_() for t in x]
        y = []
        for r, n, scale in zip(rows, handle.recv_count, scales):
            has_token = (torch.arange(len(r), device=r.device) < n.sum())[:, None]
            y.append(torch.where(has_token, torch.where(has_token, r, 0).float() * scale, 0))
        out, _ = fused_combine(y, group, handle)
        sum(o.sum() for o in out).backward()
        found.append([*out, *(s.grad for s in scales), *(t.grad for t in x)])
        for t in x:
            t.grad = None
    assert_same(found[1], array(found[0]), "sums and gradients")


def reference_rows(x, ids, probs, num_experts):
    *made, handle = reference.dispatch_forward(array(x), array(ids), array(probs), num_experts)
    return made, handle


def test_combine_has_the_references_gradients(sizes):
    rng, group, x, ids, probs = rows_world(sizes)
    made, known = reference_rows(x, ids, probs, sizes[1])
    with torch.no_grad():
        recv_x, *_, handle = fused_dispatch(x, ids, probs, sizes[1], group)
    assert_same(recv_x, made[0], "rows")
    rows = leaves(integers(rng, [r.shape for r in recv_x]))
    combined, event = fused_combine(rows, group, handle)
    grad = seeded(integers(rng, [c.shape for c in combined]), combined)
    torch.autograd.backward(combined, grad)
    assert event is None
    assert_same(combined, reference.combine_forward(array(rows), known), "combined")
    assert_same([t.grad for t in rows], reference.combine_backward(known, array(grad)), "gradient of rows")


@pytest.mark.parametrize("options", [{}, dict(num_permuted_tokens=11, pad_multiple=4)], ids=["exact", "overflowing"])
def test_hybrid_dispatch_and_combine_have_the_references_gradients(sizes, options):
    num_tokens, num_experts, _, hidden = sizes
    rng, local = np.random.default_rng(2), num_experts // len(num_tokens)
    group = group_of(len(num_tokens))
    maps = [torch.from_numpy(rng.random((n, num_experts)) < 0.6).to(DEVICE) for n in num_tokens]
    x, probs = (
        leaves(integers(rng, [(n, width) for n in num_tokens]), dtype)
        for width, dtype in ((hidden, torch.bfloat16), (num_experts, torch.float32))
    )
    rows, row_probs, scales, per_expert, handle = hybrid_ep_dispatch(x, maps, probs, group, local, **options)
    *made, known = reference.hybrid_dispatch_forward(array(x), array(maps), array(probs), local, **options)
    assert scales is None and not any(n.requires_grad for n in per_expert)
    for got, want, name in zip((rows, row_probs, per_expert), (made[0], made[1], made[3]), ("rows", "probs", "counts")):
        assert_same(got, want, name)
    combined = hybrid_ep_combine(rows, handle)
    grads = [seeded(integers(rng, [r.shape for r in results]), results) for results in (combined, row_probs)]
    torch.autograd.backward([*combined, *row_probs], [*grads[0], *grads[1]])
    grad_rows = reference.hybrid_combine_backward(known, array(grads[0]))
    wanted = reference.hybrid_dispatch_backward(known, grad_rows, array(grads[1]))
    assert_same(combined, reference.hybrid_combine_forward(made[0], known), "combined")
    assert_same([t.grad for t in x], wanted[0], "gradient of x")
    assert_same([t.grad for t in probs], wanted[1], "gradient of probs")


def test_one_result_of_one_rank_is_enough_for_a_gradient(sizes):
    """Results that nothing depends on, None and all, count as zeros."""
    _, group, x, ids, probs = rows_world(sizes)
    recv_x, *_ = FusedDispatch.apply(x, ids, probs, sizes[1], group)
    combined = FusedCombine.apply(recv_x, group, _[-1])[0]
    combined[0].sum().backward()
    for rank, (t, i) in enumerate(zip(x, ids)):
        local = sizes[1] // len(x)
        ranks = (torch.nn.functional.one_hot(torch.where(i >= 0, i // local, len(x)), len(x) + 1).sum(1) > 0)[:, :-1]
        wanted = ranks.sum(1, keepdim=True).expand(t.shape) if rank == 0 else torch.zeros_like(t)
        assert torch.equal(t.grad.float(), wanted.float())
    assert all(not p.grad.any() for p in probs)


def test_blockwise_fp8_gives_pairs_and_refuses_gradients(sizes):
    num_tokens, num_experts, _, _ = sizes
    group, local = group_of(len(num_tokens)), num_experts // len(num_tokens)
    x = leaves([np.ones((n, 128)) for n in num_tokens])
    maps = [torch.ones(n, num_experts, dtype=torch.bool, device=DEVICE) for n in num_tokens]
    init_hybrid_ep_buffer(group, 128, 8, local, 24, 24, True)
    with pytest.raises(ValueError, match="FP8 rows.*detached"):
        hybrid_ep_dispatch(x, maps, None, group, local)
    rows, probs, scales, *_ = hybrid_ep_dispatch([t.detach() for t in x], maps, None, group, local)
    assert probs is None and {r.dtype for r in rows} == {torch.float8_e4m3fn}
    assert all(torch.equal(r.float() * s, torch.ones_like(r, dtype=torch.float32)) for r, s in zip(rows, scales))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_rows_of_other_types_are_dispatched_but_refused_where_a_gradient_is_wanted(sizes, dtype):
    _, group, x, ids, probs = rows_world(sizes)
    wide = [one.detach().to(dtype) for one in x]
    for dispatch in fused_dispatch, fused_dispatch_on_device:
        for tokens in wide, [one.detach().double().requires_grad_() for one in x]:
            with pytest.raises(EPValueError, match="x has dtype torch.*convert x"):
                dispatch(tokens, ids, probs, sizes[1], group)
        with torch.no_grad():
            assert dispatch(wide, ids, probs, sizes[1], group)[0][0].dtype == dtype


def test_without_gradients_forward_is_called_as_it_is_and_gives_the_same(sizes, monkeypatch):
    """autograd takes the host more than 10 us a call: it is asked only where a gradient is wanted."""

    def refuse(*arguments):
        raise AssertionError("autograd was asked")

    _, group, x, ids, probs = rows_world(sizes)
    wanted = fused_dispatch(x, ids, probs, sizes[1], group)
    combined, _ = fused_combine(wanted[0], group, wanted[-1])
    monkeypatch.setattr(over_ranks._OverRanks, "apply", refuse)
    with pytest.raises(AssertionError, match="autograd was asked"):
        fused_dispatch(x, ids, probs, sizes[1], group)
    with torch.no_grad():
        got = fused_dispatch(x, ids, probs, sizes[1], group)
    for i in range(4):
        assert_same(got[i], list(map(array, wanted[i])), f"result {i}")
    plain = [one.detach() for one in x], ids, [one.detach() for one in probs]
    again = fused_dispatch(*plain, sizes[1], group)
    assert_same(fused_combine(again[0], group, again[-1])[0], list(map(array, combined)), "combined")
    assert all(one.grad_fn is None for one in (*got[0], *again[0]))
