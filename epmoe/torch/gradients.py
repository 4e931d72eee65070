"""What a dispatch keeps for its backward, which gradients that is given, and where there are none to be had."""

import torch

from epmoe.torch.over_ranks import any_gradient
from epmoe.torch.tensors import readable
from epmoe_ref.errors import EPValueError


def remember(ctx, group, made, probs, constant):
    """What dispatched() reads. made: the results; probs: as given; constant: results that have no gradient."""
    ctx.group, ctx.handle = group, made[-1]
    ctx.mark_non_differentiable(*constant)
    ctx.probs_need_gradient = any_gradient((probs,))
    if not group.lists:
        ctx.set_materialize_grads(False)  # torch would write zeros for ids and counts too
        ctx.rows_like = _like(made[0])
        ctx.probs_like = _like(probs) if ctx.probs_need_gradient else None


def given_to(ctx, rows_name, grad_rows, probs_name, grad_probs):
    """(grad_rows, grad_probs or None) as kernels read them. A result that nothing depends on counts as zeros."""
    if grad_rows is None:
        grad_rows = _zeros(ctx.rows_like)
    if not ctx.probs_need_gradient:
        grad_probs = None
    return readable(rows_name, grad_rows), readable(probs_name, grad_probs)


def completed(ctx, gradients):
    """The gradients of a dispatch's arguments: zeros of probs where none was given."""
    if gradients[2] is not None or not ctx.probs_need_gradient:
        return gradients
    return (*gradients[:2], _zeros(ctx.probs_like), *gradients[3:])


def _like(tensor):
    return tensor.shape, tensor.dtype, tensor.device


def _zeros(like):
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def refuse_gradients(what, *given):
    """Raise EPValueError if anything given requires a gradient: torch would round one of FP8 rows to FP8."""
    if any_gradient(given):
        raise EPValueError(
            f"{what} gives FP8 rows, through which torch passes no gradient that is worth having, but x "
            "or the probs require one: give them detached, or write a Function that dequantises between "
            "forward and backward of epmoe.fused_a2a"
        )
