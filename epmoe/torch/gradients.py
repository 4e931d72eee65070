"""Saves data of a dispatch for its backward, computes its gradients, and refuses gradients of FP8 rows."""

import torch

from epmoe.torch.over_ranks import any_gradient, leaves_of
from epmoe.torch.tensors import TENSORS
from epmoe_ref.errors import EPValueError


def remember(ctx, made, probs, *constant):
    """Save in ctx the data for gradients(). made: the results; probs: as given; constant: results without gradient."""
    ctx.handle = handle = made[-1]
    ctx.probs_need_gradient = any_gradient((probs,))
    if handle.group.lists:
        constant = leaves_of(constant)
    else:
        ctx.set_materialize_grads(False)  # torch would write zeros for ids and counts too
        ctx.rows_like = _like(made[0])
        ctx.probs_like = _like(probs) if ctx.probs_need_gradient else None
    ctx.mark_non_differentiable(*constant)


def gradients(ctx, grad_rows, grad_probs):
    """Gradients of a dispatch's tokens and probs. Missing gradients count as zeros."""
    if grad_rows is None:
        grad_rows = _zeros(ctx.rows_like)
    if not ctx.probs_need_gradient:
        grad_probs = None
    grad_x, grad_probs = ctx.handle.dispatch_gradients(grad_rows, grad_probs, TENSORS)
    if grad_probs is None and ctx.probs_need_gradient:
        grad_probs = _zeros(ctx.probs_like)
    return grad_x, grad_probs


def _like(tensor):
    return tensor.shape, tensor.dtype, tensor.device


def _zeros(like):
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def refuse_gradients(what, *given):
    """Raise EPValueError if anything given requires a gradient: torch would round the gradient of FP8 rows to FP8."""
    if any_gradient(given):
        raise EPValueError(
            f"{what} gives FP8 rows, which carry no useful gradient, but x or the probs require one: give them "
            "detached, or write a Function that dequantises between forward and backward of epmoe.fused_a2a"
        )
