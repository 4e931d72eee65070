"""epmoe.torch: gradients through torch.autograd."""

import importlib.util

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


def test_on_device_the_rows_that_hold_tokens_have_the_same_gradients(rng):
    group, ids = group_of(RANKS), topk(rng, 5, 3)
    x = [integers(rng, n, HIDDEN) for n in (5, 3)]
    probs = [integers(rng, n, TOP_K, dtype=torch.float32) for n in (5, 3)]
    recv_x, indices, recv_probs, per_expert, _ = fused.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)
    wanted = fused.fused_dispatch([a.detach() for a in x], ids, [p.detach() for p in probs], EXPERTS, group)
    g = [integers(rng, *a.shape) for a in recv_x]
    gp = [integers(rng, *a.shape, dtype=torch.float32) for a in recv_probs]
    for rank, (rows, n) in enumerate(zip(recv_x, (len(a) for a in wanted[0]))):
        assert torch.equal(rows[:n], wanted[0][rank]) and torch.equal(indices[rank][:n], wanted[1][rank])
        assert torch.equal(per_expert[rank].cpu(), wanted[3][rank].cpu())
        with torch.no_grad():
            g[rank][n:], gp[rank][n:] = float("nan"), float("nan")
            gp[rank][:n] *= wanted[1][rank] >= 0
    torch.autograd.backward([*recv_x, *recv_probs], [*g, *gp])
    assert inner(wanted[0], [a[:len(w)] for a, w in zip(g, wanted[0])]) == inner(x, [a.grad for a in x])
    assert inner(wanted[2], [a[:len(w)] for a, w in zip(gp, wanted[2])]) == inner(probs, [a.grad for a in probs])


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
