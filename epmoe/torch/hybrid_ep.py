"""HybridEPDispatch and HybridEPCombine under autograd."""

from epmoe.fused_a2a import hybrid_ep
from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe.torch.gradients import gradients, refuse_gradients, remember
from epmoe.torch.over_ranks import WorldFunction, once, way_of
from epmoe.torch.process_group import world_of
from epmoe.torch.tensors import TENSORS


class HybridEPDispatch(WorldFunction):
    """Send every token to each of its experts, rows grouped by expert. See epmoe.fused_a2a.HybridEPDispatch."""

    @staticmethod
    def plain(x, routing_map, probs, group, *options):
        given, group = (x, routing_map, probs), world_of(group)
        return hybrid_ep.dispatch(hybrid_ep_buffer(group), given, group, TENSORS, *options)

    @staticmethod
    def forward(
        ctx,
        x,
        routing_map,
        probs,
        group,
        num_local_experts,
        num_sms_dispatch_api=24,
        num_sms_combine_api=24,
        num_permuted_tokens=None,
        pad_multiple=None,
    ):
        """(dispatched_hidden, dispatched_probs, dispatched_scaling_factor, tokens_per_expert, handle).

        Gradients: x and probs. tokens_per_expert is on the CPU, or, with num_permuted_tokens, on x's device. FP8 rows
        (a buffer made with fp8_dispatch=True) carry no gradient.
        """
        group = world_of(group)
        if hybrid_ep_buffer(group).fp8_dispatch:
            refuse_gradients("fp8_dispatch=True", x, probs)
        options = num_local_experts, num_sms_dispatch_api, num_sms_combine_api, num_permuted_tokens, pad_multiple
        made = HybridEPDispatch.plain(x, routing_map, probs, group, *options)
        remember(ctx, made, probs, made[3])
        return made

    @staticmethod
    @once
    def backward(ctx, grad_x, grad_probs, grad_scaling_factor, grad_tokens_per_expert, grad_handle):
        """Gradients of forward's nine arguments: x first, probs third, None otherwise."""
        made = gradients(ctx, grad_x, grad_probs)
        return made[0], None, made[1], None, None, None, None, None, None


class HybridEPCombine(WorldFunction):
    """Send experts' rows back to their tokens' ranks and sum them. See epmoe.fused_a2a.HybridEPCombine."""

    tensors = slice(1)

    @staticmethod
    def plain(x, handle, *options):
        return hybrid_ep.combine(x, TENSORS, handle, *options)

    @staticmethod
    def forward(ctx, x, handle, num_permuted_tokens=None, pad_multiple=None):
        """combined_x; the gradient is x's."""
        ctx.handle = handle
        return HybridEPCombine.plain(x, handle, num_permuted_tokens, pad_multiple)

    @staticmethod
    @once
    def backward(ctx, grad_x):
        """Gradients of forward's arguments: x first, None otherwise."""
        return ctx.handle.combine_gradient(grad_x, TENSORS), None, None, None


def hybrid_ep_dispatch(
    x,
    routing_map,
    probs,
    group,
    num_local_experts,
    num_sms_dispatch_api=24,
    num_sms_combine_api=24,
    *,
    num_permuted_tokens=None,
    pad_multiple=None,
    num_blocks_permute=None,
    num_blocks_unpermute=None,
    fused=False,
    num_sms_preprocessing_api=None,
):
    """Send every token to each of its experts, under autograd: HybridEPDispatch.apply, with named arguments.

    x: bf16 or fp16 [T, H]. routing_map: bool [T, E]. probs: float32 [T, E], read only where routing_map is True, or
    None. group: as for fused_dispatch. num_permuted_tokens: P, the same on all ranks, and the host does not wait; None:
    it waits for P. pad_multiple: an expert's rows are rounded up to it. Returns (dispatched_hidden [P, H],
    dispatched_probs float32 [P] or None, scales or None, tokens_per_expert int64 [L], padding included, on the CPU or,
    with P given, on x's device, handle). Rows are by local expert, then src_rank, then token; their order is not free.
    Rows that do not fit into P are dropped, and handle[-1], int32 [1], is 1. Gradients: x and probs, none with FP8
    rows. num_blocks_*, fused, num_sms_preprocessing_api: Megatron-Core 0.17 to 0.19's scheduling; no effect. What
    follows num_sms_combine_api is keyword-only, since its order differs between Megatron's releases. Errors:
    EPValueError, PeerTimeout. Source: the fused_a2a page (docs/pages.md); epmoe_ref.fused_a2a.hybrid_dispatch_forward,
    hybrid_dispatch_backward.
    """
    call = way_of(HybridEPDispatch, x, probs)
    return call(
        x,
        routing_map,
        probs,
        group,
        num_local_experts,
        num_sms_dispatch_api,
        num_sms_combine_api,
        num_permuted_tokens,
        pad_multiple,
    )


def hybrid_ep_combine(x, handle, num_permuted_tokens=None, pad_multiple=None, fused=False):
    """Send experts' rows back to the ranks of their tokens and sum them, under autograd: HybridEPCombine.apply.

    x: bf16 or fp16 [P, H] in hybrid_ep_dispatch's row order, weighted by the caller; rows without a token are not
    read. handle: from hybrid_ep_dispatch. num_permuted_tokens, pad_multiple: the handle's, or left out. Returns
    combined_x [T, H]: on each rank the sum over its experts ascending, in float32, rounded; then over the ranks
    ascending, rounded. Gradient: x. Errors: EPValueError, PeerTimeout. Source: the fused_a2a page
    (docs/pages.md); epmoe_ref.fused_a2a.hybrid_combine_forward.
    """
    call = way_of(HybridEPCombine, x)
    return call(x, handle, num_permuted_tokens, pad_multiple)
