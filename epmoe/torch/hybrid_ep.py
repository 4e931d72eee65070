"""HybridEPDispatch and HybridEPCombine under autograd."""

from torch.autograd.function import once_differentiable

from epmoe import fused_a2a
from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe.fused_a2a.handles import HybridHandle, handle_of
from epmoe.torch.gradients import ask_for_gradients, refuse_gradients
from epmoe.torch.over_ranks import WorldFunction, leaves_of
from epmoe.torch.process_group import world_of
from epmoe.torch.streams import in_stream_order
from epmoe.torch.tensors import readable, tensors


class HybridEPDispatch(WorldFunction):
    """Every token to each of its experts, rows grouped by expert. See epmoe.fused_a2a.HybridEPDispatch."""

    @staticmethod
    def forward(ctx, x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, num_sms_combine_api=24,
                num_permuted_tokens=None, pad_multiple=None):
        """(dispatched_hidden, dispatched_probs, dispatched_scaling_factor, tokens_per_expert, handle).

        Gradients: x and probs. tokens_per_expert is on the CPU, or, with num_permuted_tokens, where x is. Rows in FP8
        (a buffer made with fp8_dispatch=True) carry no gradient.
        """
        group = world_of(group)
        if hybrid_ep_buffer(group).fp8_dispatch:
            refuse_gradients("fp8_dispatch=True", x, probs)
        given = readable("x", x), readable("routing_map", routing_map), readable("probs", probs)
        made = in_stream_order(
            group, fused_a2a.HybridEPDispatch.forward, ctx, *given, group, num_local_experts, num_sms_dispatch_api,
            num_sms_combine_api, num_permuted_tokens, pad_multiple)
        ctx.handle.shown = tensors
        ctx.probs_need_gradient = ask_for_gradients(probs)
        ctx.mark_non_differentiable(*(one for one in leaves_of([made[2], made[3]]) if one is not None))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_probs, grad_scaling_factor, grad_tokens_per_expert, grad_handle):
        """Gradients of forward's nine arguments: x first, probs third, None otherwise."""
        probs = readable("grad_probs", grad_probs) if ctx.probs_need_gradient else None
        rows = readable("grad_x", grad_x)
        return in_stream_order(ctx.group, fused_a2a.HybridEPDispatch.backward, ctx, rows, probs, None, None, None)


class HybridEPCombine(WorldFunction):
    """Rows of experts back to their tokens' ranks, summed. See epmoe.fused_a2a.HybridEPCombine."""

    @staticmethod
    def forward(ctx, x, handle, num_permuted_tokens=None, pad_multiple=None):
        """combined_x; the gradient is x's."""
        rows, group = readable("x", x), handle_of(HybridHandle, handle).group
        return in_stream_order(group, fused_a2a.HybridEPCombine.forward, ctx, rows, handle, num_permuted_tokens,
                               pad_multiple)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x):
        """Gradients of forward's arguments: x first, None otherwise."""
        given = readable("grad_x", grad_x)
        return in_stream_order(ctx.group, fused_a2a.HybridEPCombine.backward, ctx, given)


def hybrid_ep_dispatch(x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, num_sms_combine_api=24,
                       num_permuted_tokens=None, pad_multiple=None, *, num_blocks_permute=None,
                       num_blocks_unpermute=None, fused=False, num_sms_preprocessing_api=None):
    """HybridEPDispatch.apply, arguments by position or by name. See epmoe.fused_a2a.hybrid_ep_dispatch."""
    return HybridEPDispatch.apply(x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api,
                                  num_sms_combine_api, num_permuted_tokens, pad_multiple)


def hybrid_ep_combine(x, handle, num_permuted_tokens=None, pad_multiple=None, *, fused=False):
    """HybridEPCombine.apply, arguments by position or by name. See epmoe.fused_a2a.hybrid_ep_combine."""
    return HybridEPCombine.apply(x, handle, num_permuted_tokens, pad_multiple)
