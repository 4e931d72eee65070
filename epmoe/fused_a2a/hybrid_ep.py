"""HybridEPDispatch and HybridEPCombine: exchange and permutation in one call; a row for each (token, local expert)."""

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.buffer import PLAIN
from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe.fused_a2a.hybrid import ARGUMENTS, DispatchPlan, HybridHandle


class HybridEPDispatch:
    """Send every token to each of its experts, rows grouped by expert, and the gradient back."""

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

        x: [T, H], bf16 or fp16, rows a multiple of 16 bytes. routing_map: bool [T, E]. probs: float32 [T, E], read only
        where routing_map is True, or None. num_permuted_tokens: P, the same on all ranks; the host does not wait, and
        counts stay on the device. None: the host waits for the exact P. pad_multiple: each expert's rows are rounded up
        to it; None, 0: not. dispatched_hidden [P, H]: by local expert, then src_rank, then token; zeros in padding and
        after the last row. dispatched_probs: float32 [P], or None. dispatched_scaling_factor: None, or, if the
        buffer was made with fp8_dispatch=True, float32 [P, H / 128] with dispatched_hidden in e4m3. tokens_per_expert:
        int64 [L], padding included. Rows that do not fit into P are dropped from the end, and handle.overflow (int32
        [1]) is 1. A batch larger than any before makes the buffer grow on all ranks; with num_permuted_tokens it must
        be larger on all of them. num_sms_dispatch_api, num_sms_combine_api affect only scheduling; None: all SMs.
        """
        options = num_local_experts, num_sms_dispatch_api, num_sms_combine_api, num_permuted_tokens, pad_multiple
        made = dispatch(hybrid_ep_buffer(group), (x, routing_map, probs), group, PLAIN, *options)
        ctx.handle = made[-1]
        return made

    @staticmethod
    def backward(ctx, grad_x, grad_probs, grad_scaling_factor, grad_tokens_per_expert, grad_handle):
        """Gradients of forward's nine arguments: grad_x [T, H] first, grad_probs [T, E] third, None otherwise.

        grad_x[t] sums the token's rows as HybridEPCombine.forward does; grad_probs is a copy where a pair has a row,
        zero elsewhere. Rows without a token are never read. grad_probs=None gives None.
        """
        grad_x, grad_probs = ctx.handle.dispatch_gradients(grad_x, grad_probs)
        return grad_x, None, grad_probs, None, None, None, None, None, None


class HybridEPCombine:
    """Send experts' rows back to the ranks of their tokens, sum them by token, and send the gradient out again."""

    @staticmethod
    def forward(ctx, x, handle, num_permuted_tokens=None, pad_multiple=None):
        """combined_x [T, H], of x's dtype D, unweighted.

        x: [P, H], bf16 or fp16, in dispatch's row order; rows without a token are never read. handle: from
        HybridEPDispatch.forward. num_permuted_tokens, pad_multiple: may be left out, or must equal the handle's (the
        first is one number, or a list over ranks). Sums in float32 from +0.0: on each rank D(sum over its experts
        ascending), then D(sum over the ranks of a p2p world ascending), then D(sum over these worlds).
        """
        ctx.handle = handle
        return hybrid_ep_combine(x, handle, num_permuted_tokens, pad_multiple)

    @staticmethod
    def backward(ctx, grad_x):
        """Gradients of forward's four arguments: (grad_x [P, H], None, None, None); rows without a token are zero."""
        return ctx.handle.combine_gradient(grad_x), None, None, None


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
    """HybridEPDispatch.forward without a ctx; see there for arguments, results and errors.

    num_blocks_*, fused and num_sms_preprocessing_api exist in Megatron-Core 0.17 to 0.19, where they divide the work
    among kernels; here they change nothing. What follows num_sms_combine_api is keyword-only, since its order differs
    between Megatron's releases.
    """
    options = num_local_experts, num_sms_dispatch_api, num_sms_combine_api, num_permuted_tokens, pad_multiple
    given = x, routing_map, probs
    return dispatch(hybrid_ep_buffer(group), given, group, PLAIN, *options)


def hybrid_ep_combine(x, handle, num_permuted_tokens=None, pad_multiple=None, fused=False):
    """HybridEPCombine.forward without a ctx; see there for arguments, results and errors. fused: changes nothing."""
    return combine(x, PLAIN, handle, num_permuted_tokens, pad_multiple)


def dispatch(buffer, given, group, interface, num_local_experts, num_sms_dispatch, num_sms_combine, num_rows, pad):
    """hybrid_ep_dispatch for any Interface. given: x, routing_map, and probs or None."""
    # True == 1 and 2.0 == 2 would find the plan of the int, so check types
    if not (
        type(num_local_experts) is type(num_rows) is int
        and pad is None
        and type(num_sms_dispatch) is type(num_sms_combine) is int
        and num_sms_dispatch > 0
        and num_sms_combine > 0
    ):
        num_sms_dispatch = arguments.plain("num_sms_dispatch_api", num_sms_dispatch, 1)
        num_sms_combine = arguments.plain("num_sms_combine_api", num_sms_combine, 1)
        num_local_experts = arguments.plain("num_local_experts", num_local_experts, 1)
        num_rows = arguments.plain("num_permuted_tokens", num_rows)
        pad = arguments.plain("pad_multiple", pad)
    if given[2] is None or group.lists and arguments.absent(given[2]):
        given = given[:2]
    num_sms, a_world = (num_sms_dispatch, num_sms_combine), getattr(group, "p2p_world_size", None)
    how = num_local_experts, num_rows, pad, buffer.fp8_dispatch, a_world, num_sms
    name, kind = "hybrid_ep_dispatch", DispatchPlan
    made, handle = buffer.call(name, kind, ARGUMENTS, given, how, group, interface)
    return (*made, handle)


def combine(x, interface, handle, num_permuted_tokens=None, pad_multiple=None):
    """hybrid_ep_combine for any Interface."""
    if type(handle) is not HybridHandle:
        HybridHandle.refuse(handle)
    n = num_permuted_tokens
    is_same = n is None or type(n) is int and handle.num_rows == [n]
    if not is_same or pad_multiple is not None:
        arguments.same_as_handle(handle, n, pad_multiple)
    return handle.combined(x, interface)
