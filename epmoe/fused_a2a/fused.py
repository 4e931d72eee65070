"""FusedDispatch and FusedCombine: a token travels once to each rank that has one of its experts."""

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.buffer import PLAIN
from epmoe.fused_a2a.buffers import buffer_of
from epmoe.fused_a2a.rows import ARGUMENTS, DispatchPlan, RowsHandle
from epmoe.host import inputs
from epmoe_ref.errors import EPValueError


class FusedDispatch:
    """Send every token to the ranks of its experts, and its gradient back."""

    @staticmethod
    def forward(
        ctx, x, token_indices, token_probs, num_experts, group, async_finish=False, allocate_on_comm_stream=False
    ):
        """(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle).

        x: [T, H], rows a multiple of 16 bytes, any dtype; or, going beyond upstream, blockwise FP8 as a pair (e4m3 [T,
        H], float32 scales [T, H / 128]). token_indices: integers [T, K], distinct global expert ids in a token, -1 for
        none. token_probs: float32 [T, K].
        recv_x [N, H], a pair if x was: one row for each (source token, this rank), by src_rank, then token.
        recv_token_indices: int64 [N, K], local ids, -1 where k's expert is elsewhere; recv_token_probs: float32
        [N, K], 0 there. tokens_per_expert: int64 [L] on the host. The host waits until it knows N, while rows are
        still travelling. If a rank fails after that, the next call that waits, or check(), raises the error.
        async_finish, allocate_on_comm_stream: change nothing (docs/pages.md), since all work is in the order of the
        world's stream. The second is refused without the first, as upstream.
        num_experts: E, a multiple of the number of ranks; group: the world.
        Errors: EPValueError names argument, rank, value; PeerTimeout. Source: FusedDispatch on
        the fused_a2a page (docs/pages.md).
        """
        made = fused_dispatch(x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream)
        ctx.handle = made[-1]
        return made

    @staticmethod
    def backward(ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, grad_handle):
        """Gradients of forward's arguments: (grad_x, None, grad_token_probs, None, None, None, None).

        grad_x sums the gradients of each token's rows in float32, over ranks ascending, and rounds once to
        grad_output's dtype (bf16, fp16, float32). grad_token_probs is not masked: it is the exact adjoint only if the
        caller's gradient is 0 where recv_token_indices is -1. None gives None.
        """
        grad_x, grad_probs = ctx.handle.dispatch_gradients(grad_output, grad_token_probs)
        return grad_x, None, grad_probs, None, None, None, None


class FusedDispatchOnDevice:
    """FusedDispatch in which the host never waits; see fused_dispatch_on_device."""

    @staticmethod
    def forward(ctx, x, token_indices, token_probs, num_experts, group):
        """(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle); see fused_dispatch_on_device."""
        made = fused_dispatch_on_device(x, token_indices, token_probs, num_experts, group)
        ctx.handle = made[-1]
        return made

    @staticmethod
    def backward(ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, grad_handle):
        """Gradients of forward's five arguments, as FusedDispatch's; rows after the first N are not read."""
        return FusedDispatch.backward(ctx, grad_output, None, grad_token_probs, None, None)[:5]


class FusedCombine:
    """Send rows back to the ranks of their tokens, sum them by token, and send the gradient out again."""

    @staticmethod
    def forward(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
        """(combined_x [T, H], None): the sum over the token's ranks ascending, in float32, rounded once to x's dtype.

        x: [N, H] in dispatch's row order, bf16, fp16 or float32, already weighted and summed over the local experts.
        handle: from FusedDispatch.forward; H and dtype may differ from the dispatch's. A token that was not sent gives
        zeros. async_finish, allocate_on_comm_stream: change nothing, as in FusedDispatch. There is no event, since the
        result is in the order of the world's stream.
        """
        ctx.handle = handle
        return fused_combine(x, group, handle, async_finish, allocate_on_comm_stream)

    @staticmethod
    def backward(ctx, grad_output, previous_event=None):
        """Gradients of forward's arguments: (grad_x [N, H], None, None, None, None); grad_x is a cached dispatch.

        previous_event: the gradient of forward's second result, None; it changes nothing.
        """
        return ctx.handle.combine_gradient(grad_output), None, None, None, None


def fused_dispatch(
    x, token_indices, token_probs, num_experts, group, async_finish=False, allocate_on_comm_stream=False
):
    """FusedDispatch.forward without a ctx; see there for arguments, results and errors."""
    if allocate_on_comm_stream:
        arguments.scheduling(async_finish, allocate_on_comm_stream)
    given = x, token_indices, token_probs
    return dispatch(buffer_of(group), given, num_experts, group, PLAIN, False)


def fused_dispatch_on_device(x, token_indices, token_probs, num_experts, group):
    """fused_dispatch in which the host never waits, going beyond upstream: (recv_x, ..., tokens_per_expert, handle).

    Results have room for the worst case, R * T rows with the largest T so far. The first N hold tokens; the others, and
    their gradients, are never read and hold anything. N is the sum of handle.recv_count, int32 [R] on the device: mask
    later rows before you sum over rows, as for an expert's gradients. tokens_per_expert stays on the device. Arguments:
    as FusedDispatch.forward. A batch larger than any before must be larger on all ranks. The handle serves
    fused_combine and the gradients, with arrays of that many rows. All these calls can be captured in a graph.
    """
    given = x, token_indices, token_probs
    return dispatch(buffer_of(group), given, num_experts, group, PLAIN, True)


def fused_combine(x, group, handle, async_finish=False, allocate_on_comm_stream=False):
    """FusedCombine.forward without a ctx; see there for arguments, results and errors."""
    if allocate_on_comm_stream:
        arguments.scheduling(async_finish, allocate_on_comm_stream)
    expect_handle(handle, group)
    return handle.combined(x), None


def dispatch(buffer, given, num_experts, group, interface, on_device):
    """fused_dispatch, or fused_dispatch_on_device, for any Interface. given: x, token_indices, token_probs."""
    if type(num_experts) is not int:
        num_experts = arguments.plain("num_experts", num_experts, 1)
    if isinstance(given[0], (list, tuple)):
        x, *scales = values_and_scales(group.lists, given[0])
        given = x, *given[1:], *scales
    how = num_experts, RowsHandle.num_sms[0], on_device
    name = "fused_dispatch_on_device" if on_device else "fused_dispatch"
    made, handle = buffer.call(name, DispatchPlan, ARGUMENTS, given, how, group, interface)
    return (*made, handle)


def expect_handle(handle, group):
    """Raise EPValueError unless a fused_dispatch over this group made the handle."""
    if type(handle) is not RowsHandle:
        RowsHandle.refuse(handle)
    if handle.group is not group:
        inputs.world("group", group)
        raise EPValueError(
            f"group is {group!r}, and the handle belongs to a dispatch over another one, "
            f"{handle.group!r}: rows go back over the group that they came by; pass that one"
        )


def values_and_scales(is_list, given):
    """Hidden states x as (x,), or (values, scales) if every rank gives a pair (e4m3 values, float32 scales).

    is_list: whether `given` is a list over ranks.
    """
    of_all = given if is_list else [given]
    if not any(isinstance(a, (list, tuple)) for a in of_all):
        return (given,)
    if not all(isinstance(a, (list, tuple)) and len(a) == 2 for a in of_all):
        rule = "on every rank, or on none" if is_list else "or one array; lists over ranks are for a LocalWorld"
        raise EPValueError(f"x is a pair (e4m3 values, float32 scales) {rule}")
    return tuple(map(list, zip(*of_all))) if is_list else tuple(given)
