"""epmoe.torch: gradients through torch.autograd, and a block of experts that trains as its dense counterpart does."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("these tests are about torch, which is not installed", allow_module_level=True)

import torch
from rows_group import OneRank, group_of

from epmoe import LocalWorld, device
from epmoe import torch as fused

WHERE = "cpu" if device.SIM else "cuda"
RANKS, EXPERTS, TOP_K, HIDDEN = 2, 4, 2, 8


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(1)


def integers(rng, *shape, dtype=torch.bfloat16):
    """Small whole numbers, whose sums are exact."""
    return torch.randint(-3, 4, shape, generator=rng).to(dtype).to(WHERE).requires_grad_()


def inner(one, other):
    return sum(float((a.detach().double() * b.detach().double()).sum()) for a, b in zip(one, other))


def topk(rng, *num_tokens):
    return [torch.rand(n, EXPERTS, generator=rng).topk(TOP_K).indices.to(WHERE) for n in num_tokens]


def test_gradients_of_rows_are_adjoint_through_autograd(rng):
    group, ids = group_of(RANKS), topk(rng, 5, 3)
    x = [integers(rng, n, HIDDEN) for n in (5, 3)]
    probs = [integers(rng, n, TOP_K, dtype=torch.float32) for n in (5, 3)]
    recv_x, indices, recv_probs, per_expert, handle = fused.fused_dispatch(x, ids, probs, EXPERTS, group)
    assert recv_x[0].dtype == torch.bfloat16 and recv_x[0].device.type == WHERE
    assert [int(n.sum()) for n in per_expert] == [int((i >= 0).sum()) for i in indices]
    g = [integers(rng, *a.shape) for a in recv_x]
    gp = [integers(rng, *a.shape, dtype=torch.float32) * (i >= 0) for a, i in zip(recv_probs, indices)]
    torch.autograd.backward([*recv_x, *recv_probs], [*g, *gp])
    assert inner(recv_x, g) == inner(x, [a.grad for a in x])
    assert inner(recv_probs, gp) == inner(probs, [a.grad for a in probs])
    rows = [integers(rng, *a.shape) for a in recv_x]
    combined, event = fused.fused_combine(rows, group, handle)
    back = [integers(rng, *a.shape) for a in combined]
    torch.autograd.backward(combined, back)
    assert event is None and inner(combined, back) == inner(rows, [a.grad for a in rows])


@pytest.mark.parametrize("budget", [None, 6])
def test_gradients_by_expert_are_adjoint_through_autograd(rng, budget):
    group = group_of(RANKS)
    maps = [(torch.rand(n, EXPERTS, generator=rng) < 0.5).to(WHERE) for n in (5, 3)]
    x = [integers(rng, n, HIDDEN) for n in (5, 3)]
    probs = [integers(rng, n, EXPERTS, dtype=torch.float32) for n in (5, 3)]
    hidden, row_probs, scales, per_expert, handle = fused.hybrid_ep_dispatch(
        x, maps, probs, group, EXPERTS // RANKS, num_permuted_tokens=budget, pad_multiple=2)
    g, gp = [integers(rng, *a.shape) for a in hidden], [integers(rng, *a.shape, dtype=torch.float32) for a in row_probs]
    torch.autograd.backward([*hidden, *row_probs], [*g, *gp])
    assert scales is None and per_expert[0].dtype == torch.int64
    assert inner(hidden, g) == inner(x, [a.grad for a in x])
    assert inner(row_probs, gp) == inner([p * m for p, m in zip(probs, maps)], [a.grad for a in probs])
    rows = [integers(rng, *a.shape) for a in hidden]
    sizes = [torch.tensor(a.shape[0]) for a in hidden]
    combined = fused.hybrid_ep_combine(rows, handle, num_permuted_tokens=sizes, pad_multiple=2)
    back = [integers(rng, *a.shape) for a in combined]
    torch.autograd.backward(combined, back)
    assert inner(combined, back) == inner(rows, [a.grad for a in rows])


def test_results_that_get_no_gradient_count_as_zero(rng):
    group, ids = group_of(RANKS), topk(rng, 4, 4)
    x, probs = [integers(rng, 4, HIDDEN) for _ in ids], [integers(rng, 4, TOP_K, dtype=torch.float32) for _ in ids]
    recv_x, *_ = fused.fused_dispatch(x, ids, probs, EXPERTS, group)
    recv_x[0].float().sum().backward()
    wanted = [sum(((i // 2) == 0).any(dim=1).float() for i in [own]) for own in ids]
    assert all(torch.equal(a.grad.float(), w[:, None].expand(4, HIDDEN)) for a, w in zip(x, wanted))
    assert not any(p.grad is not None and p.grad.any() for p in probs)


def test_one_rank_a_process_takes_and_gives_tensors(rng):
    group = OneRank(LocalWorld(1))
    x, probs = integers(rng, 5, HIDDEN), integers(rng, 5, TOP_K, dtype=torch.float32)
    recv_x, indices, recv_probs, per_expert, handle = fused.fused_dispatch(x, topk(rng, 5)[0], probs, EXPERTS, group)
    combined, _ = fused.fused_combine(recv_x, group, handle)
    (combined.float().sum() + recv_probs.sum()).backward()
    assert torch.equal(combined, x) and torch.equal(x.grad, torch.ones_like(x))
    assert int(per_expert.sum()) == indices.numel()
    assert torch.equal(probs.grad, torch.ones_like(probs))
    routing_map = torch.rand(5, EXPERTS, generator=rng).to(WHERE) < 0.5
    hidden, row_probs, _, _, handle = fused.hybrid_ep_dispatch(x, routing_map, None, group, EXPERTS)
    combined = fused.hybrid_ep_combine(hidden, handle)
    assert row_probs is None and torch.equal(combined, x * routing_map.sum(dim=1, keepdim=True))


def parameters():
    """Two layers: a router [EXPERTS, HIDDEN], and for each expert two matrices."""
    rng = torch.Generator().manual_seed(7)
    shapes = [(EXPERTS, HIDDEN), (EXPERTS, HIDDEN, 16), (EXPERTS, 16, HIDDEN)] * 2
    return [(torch.randn(shape, generator=rng) / shape[-1] ** 0.5).to(WHERE).requires_grad_() for shape in shapes]


def expert(x, first, second):
    return torch.nn.functional.silu(x @ first) @ second


def dense_layer(x, router, first, second):
    """Each token through its top experts, expert by expert."""
    probs, ids = torch.softmax(x @ router.T, dim=-1).topk(TOP_K)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        weight = (probs * (ids == e)).sum(dim=1, keepdim=True)
        out = out + weight * expert(x, first[e], second[e])
    return x + out


def parallel_layer(xs, group, router, first, second):
    """The same with the experts spread over the ranks; xs: tokens of each rank."""
    routed = [torch.softmax(x @ router.T, dim=-1).topk(TOP_K) for x in xs]
    rows, ids, probs, _, handle = fused.fused_dispatch(
        xs, [r.indices for r in routed], [r.values for r in routed], EXPERTS, group)
    local, outs = EXPERTS // RANKS, []
    for rank, (x, i, p) in enumerate(zip(rows, ids, probs)):
        out = torch.zeros_like(x)
        for e in range(local):
            weight = (p * (i == e)).sum(dim=1, keepdim=True)
            out = out + weight * expert(x, first[rank * local + e], second[rank * local + e])
        outs.append(out)
    combined, _ = fused.fused_combine(outs, group, handle)
    return [x + y for x, y in zip(xs, combined)]


def test_a_block_of_two_layers_trains_as_the_dense_one_does():
    """50 steps in float32; only the order of sums differs, so the losses agree within its rounding."""
    group, rng = group_of(RANKS), torch.Generator().manual_seed(3)
    x = [torch.randn(n, HIDDEN, generator=rng).to(WHERE) for n in (4, 3)]
    target = torch.randn(7, HIDDEN, generator=rng).to(WHERE)
    losses = []
    for is_parallel in (False, True):
        weights, history = parameters(), []
        for _ in range(50):
            hidden = x if is_parallel else torch.cat(x)
            for layer in (weights[:3], weights[3:]):
                hidden = parallel_layer(hidden, group, *layer) if is_parallel else dense_layer(hidden, *layer)
            loss = ((torch.cat(hidden) if is_parallel else hidden) - target).square().mean()
            grads = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for w, g in zip(weights, grads):
                    w -= 0.1 * g
            history.append(float(loss.detach()))
        losses.append(history)
    assert losses[0][-1] < losses[0][0] / 2
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
