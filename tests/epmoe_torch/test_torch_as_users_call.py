"""What users of torch do around these functions: dtypes, layouts, what requires gradients, checkpoints, autocast.

One rank seen as one rank a process: every token comes back as it was, or as often as it has experts.
"""

import warnings

import pytest
import torch
from small_tensors import DEVICE
from torch.utils.checkpoint import checkpoint

from epmoe.torch import fused_combine, fused_dispatch, hybrid_ep_combine, hybrid_ep_dispatch

TOKENS, HIDDEN, EXPERTS, TOP_K = 5, 16, 4, 2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.filterwarnings("error")


def whole(draw, *shape, dtype=BF16):
    """Small whole numbers, whose sums are exact."""
    return torch.randint(-3, 4, shape, generator=draw).to(DEVICE, dtype)


def chosen(draw):
    """ids int64 [T, K] and the same as routing_map bool [T, E]."""
    ids = torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K).indices.to(DEVICE)
    return ids, torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device=DEVICE).scatter(1, ids, True)


def by_rows(group, x, ids, probs):
    """Rows weighted with the sum of their probs, and back."""
    rows, _, row_probs, _, handle = fused_dispatch(x, ids, probs, EXPERTS, group)
    return fused_combine((rows * row_probs.sum(1, keepdim=True)).to(rows.dtype), group, handle)[0]


def by_expert(group, x, routing_map, probs):
    """A row for each expert, weighted with its prob, and back."""
    rows, row_probs, _, _, handle = hybrid_ep_dispatch(x, routing_map, probs, group, EXPERTS)
    return hybrid_ep_combine((rows * row_probs.unsqueeze(1)).to(rows.dtype), handle)


def cases(draw, dtype=BF16):
    """(function, x, where tokens go, probs, dense probs as weights of tokens) of both families."""
    ids, routing_map = chosen(draw)
    for function, goes, probs in (
        (by_rows, ids, whole(draw, TOKENS, TOP_K, dtype=FP32)),
        (by_expert, routing_map, whole(draw, TOKENS, EXPERTS, dtype=FP32)),
    ):
        # rows of equally many bytes share kernels
        hidden = HIDDEN // 2 if dtype == FP32 else HIDDEN
        yield function, whole(draw, TOKENS, hidden, dtype=dtype), goes, probs


def weight(goes, probs):
    """What every element of a token is multiplied with [T, 1]."""
    return (probs * goes if goes.dtype == torch.bool else probs).sum(1, keepdim=True)


def assert_gradients(function, x, goes, probs, out, gradient):
    """Result and gradients, as far as they are required; none elsewhere."""
    assert out.dtype == x.dtype and torch.equal(out.float(), x.float() * weight(goes, probs))
    if x.requires_grad:
        assert x.grad.dtype == x.dtype
        assert torch.equal(x.grad.float(), gradient.float() * weight(goes, probs))
    if probs.requires_grad:
        of_token = (x.float() * gradient.float()).sum(1, keepdim=True).expand(probs.shape)
        assert torch.equal(probs.grad, of_token * goes if goes.dtype == torch.bool else of_token)
    assert (x.grad is None) != x.requires_grad and (probs.grad is None) != probs.requires_grad


def of_columns(t):
    """The same values, not contiguous."""
    return t.T.contiguous().T


def not_contiguous(function, group, x, goes, probs):
    assert not any(of_columns(t).is_contiguous() for t in (x, goes, probs))
    return function(group, *map(of_columns, (x, goes, probs)))


def compiled(function, group, *given):
    with warnings.catch_warnings():
        # torch.compile asks tensors that are no leaves for their gradients
        warnings.simplefilter("ignore")
        return torch.compile(lambda *of: function(group, *of), backend="eager")(*given)


def autocast(function, group, x, *given):
    with torch.autocast(DEVICE.type, x.dtype):
        return function(group, x, *given)


def checkpointed(use_reentrant):
    return lambda function, *given: checkpoint(function, *given, use_reentrant=use_reentrant)


def direct(function, *given):
    return function(*given)


WAYS = {
    "bfloat16": (direct, BF16),
    "float16": (direct, FP16),
    "float32": (direct, FP32),
    "not contiguous": (not_contiguous, BF16),
    "checkpoint, reentrant": (checkpointed(True), BF16),
    "checkpoint": (checkpointed(False), BF16),
    "compiled": (compiled, BF16),
    "autocast bfloat16": (autocast, BF16),
    "autocast float16": (autocast, FP16),
}


@pytest.mark.parametrize(
    "way, required",
    [(way, (True, True)) for way in WAYS]
    + [("bfloat16", required) for required in ((True, False), (False, True), (False, False))],
    ids=str,
)
def test_results_and_gradients_are_the_same_in_whatever_way_they_are_called(group, draw, way, required):
    call, dtype = WAYS[way]
    for function, x, goes, probs in cases(draw, dtype):
        x.requires_grad_(required[0]), probs.requires_grad_(required[1])
        if function is by_expert and dtype == FP32:
            with pytest.raises(ValueError, match="x of rank 0 has dtype float32, bfloat16 or float16 is needed"):
                call(function, group, x, goes, probs)
            continue
        out = call(function, group, x, goes, probs)
        gradient = whole(draw, *x.shape, dtype=dtype)
        if way == "not contiguous":
            gradient = gradient[:1].expand(x.shape)
        assert out.requires_grad == any(required)
        if any(required):
            out.backward(gradient)
        assert_gradients(function, x, goes, probs, out, gradient)


def test_second_gradients_and_transforms_are_refused(group, draw):
    for function, x, goes, probs in cases(draw):
        x.requires_grad_()
        out = function(group, x, goes, probs)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.float().sum().backward()
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: function(group, x, goes, probs).float().sum())(x.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_graph(group, draw, mode):
    for function, x, goes, probs in cases(draw):
        x.requires_grad_(), probs.requires_grad_()
        with mode():
            out = function(group, x, goes, probs)
            assert not out.requires_grad
            assert torch.equal(out.float(), x.float() * weight(goes, probs))


def test_numbers_may_be_tensors(group, draw):
    ids, routing_map = chosen(draw)
    x, probs = whole(draw, TOKENS, HIDDEN), whole(draw, TOKENS, TOP_K, dtype=FP32)
    dense = whole(draw, TOKENS, EXPERTS, dtype=FP32)
    experts, budget, pad = (torch.tensor(n) for n in (EXPERTS, 12, 2))
    rows, *_ = fused_dispatch(x, ids, probs, experts, group)
    assert torch.equal(rows, x)
    for number in (12, 8):
        budget.fill_(number)
        rows, _, _, per_expert, handle = hybrid_ep_dispatch(
            x, routing_map, dense, group, experts, num_permuted_tokens=budget, pad_multiple=pad
        )
        assert len(rows) == number and int(per_expert.sum()) <= number
    out = hybrid_ep_combine(rows, handle, num_permuted_tokens=budget, pad_multiple=pad)
    assert out.shape == x.shape


def test_pairs_of_blockwise_fp8_travel_and_carry_no_gradient(group, draw):
    ids, _ = chosen(draw)
    values = whole(draw, TOKENS, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(TOKENS, 2, generator=draw).to(DEVICE)
    probs = whole(draw, TOKENS, TOP_K, dtype=FP32)
    rows, _, row_probs, _, handle = fused_dispatch((values, scales), ids, probs, EXPERTS, group)
    assert torch.equal(rows[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rows[1], scales)
    decoded = rows[0].float() * rows[1].repeat_interleave(128, dim=1)
    out, _ = fused_combine(decoded.to(BF16), group, handle)
    assert torch.equal(row_probs, probs) and out.shape == (TOKENS, 256)
    with pytest.raises(ValueError, match="x as a pair gives FP8 rows.*detached"):
        fused_dispatch((values, scales), ids, probs.requires_grad_(), EXPERTS, group)


@pytest.mark.parametrize("what", ["no experts", "no tokens"])
def test_nothing_to_send_gives_zeros_and_gets_zeros(group, draw, what):
    for function, x, goes, probs in cases(draw):
        if what == "no tokens":
            x, goes, probs = x[:0].clone(), goes[:0], probs[:0].clone()
        goes[:] = False if goes.dtype == torch.bool else -1
        x.requires_grad_(), probs.requires_grad_()
        out = function(group, x, goes, probs)
        out.backward(torch.ones_like(out))
        assert out.shape == x.shape and not out.any()
        for one in x, probs:
            assert one.grad.shape == one.shape and not one.grad.any()
