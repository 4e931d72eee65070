"""FusedDispatch and FusedCombine under autograd."""

import torch

from epmoe.fused_a2a import arguments, fused
from epmoe.fused_a2a.buffers import buffer_of
from epmoe.fused_a2a.fused import expect_handle
from epmoe.host import inputs
from epmoe.torch.gradients import gradients, refuse_gradients, remember
from epmoe.torch.over_ranks import WorldFunction, any_gradient, leaves_of, once, way_of
from epmoe.torch.process_group import world_of
from epmoe.torch.tensors import TENSORS
from epmoe_ref.errors import EPValueError

SUMMED = torch.bfloat16, torch.float16, torch.float32  # types of rows whose gradients are summed


class FusedDispatch(WorldFunction):
    """Send every token to the ranks of its experts. Its gradient is a combine. See epmoe.fused_a2a.FusedDispatch."""

    @staticmethod
    def plain(x, token_indices, token_probs, num_experts, group, async_finish=False, allocate_on_comm_stream=False):
        if allocate_on_comm_stream:
            arguments.scheduling(async_finish, allocate_on_comm_stream)
        given, group = (x, token_indices, token_probs), world_of(group)
        return fused.dispatch(buffer_of(group), given, num_experts, group, TENSORS, False)

    @staticmethod
    def forward(
        ctx, x, token_indices, token_probs, num_experts, group, async_finish=False, allocate_on_comm_stream=False
    ):
        """(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle); gradients: x and token_probs.

        tokens_per_expert is on the CPU, the other tensors on x's device. FP8 pairs carry no gradient.
        """
        given = x, token_indices, token_probs, num_experts, group
        return _recorded(ctx, FusedDispatch.plain, *given, async_finish, allocate_on_comm_stream)

    @staticmethod
    @once
    def backward(ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, grad_handle):
        """Gradients of forward's arguments: x first, token_probs third, None otherwise; torch ignores further None."""
        made = gradients(ctx, grad_output, grad_token_probs)
        return made[0], None, made[1], None, None, None, None


class FusedDispatchOnDevice(FusedDispatch):
    """FusedDispatch in which the host never waits. See epmoe.fused_a2a.fused_dispatch_on_device."""

    @staticmethod
    def plain(x, token_indices, token_probs, num_experts, group):
        given, group = (x, token_indices, token_probs), world_of(group)
        return fused.dispatch(buffer_of(group), given, num_experts, group, TENSORS, True)

    @staticmethod
    def forward(ctx, x, token_indices, token_probs, num_experts, group):
        """(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle); gradients: x and token_probs.

        All tensors are on x's device, with room for the worst case. Rows after the first N hold nothing, and their
        gradients are not read. FP8 pairs carry no gradient.
        """
        return _recorded(ctx, FusedDispatchOnDevice.plain, x, token_indices, token_probs, num_experts, group)


def _recorded(ctx, plain, x, token_indices, token_probs, *more):
    """The results of plain(). Saves in ctx which results and arguments have gradients."""
    if type(x) is not torch.Tensor or x.dtype not in SUMMED:
        _expect_computable(x, token_probs, inputs.world("group", world_of(more[1])))
    made = plain(x, token_indices, token_probs, *more)
    remember(ctx, made, token_probs, made[1], made[3])
    return made


def _expect_computable(x, token_probs, world):
    """Raise EPValueError if gradients are required that cannot be computed: of FP8 pairs, or of another type's rows."""
    of_ranks = x if world.lists else [x]
    if isinstance(of_ranks, list) and any(isinstance(one, (list, tuple)) for one in of_ranks):
        refuse_gradients("x as a pair", x, token_probs)
    for one in leaves_of(x) if any_gradient((x, token_probs)) else ():
        if isinstance(one, torch.Tensor) and one.dtype not in SUMMED:
            raise EPValueError(
                f"x has dtype {one.dtype}, and x or token_probs requires a gradient: gradients need bfloat16, "
                "float16 or float32; convert x, or call under torch.no_grad()"
            )


class FusedCombine(WorldFunction):
    """Send rows back to their tokens' ranks and sum them; gradient: a dispatch. See epmoe.fused_a2a.FusedCombine."""

    tensors = slice(1)

    @staticmethod
    def plain(x, group, handle, async_finish=False, allocate_on_comm_stream=False):
        if allocate_on_comm_stream:
            arguments.scheduling(async_finish, allocate_on_comm_stream)
        expect_handle(handle, world_of(group))
        return handle.combined(x, TENSORS), None

    @staticmethod
    def forward(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
        """(combined_x, None); the gradient is x's."""
        ctx.handle = handle
        return FusedCombine.plain(x, group, handle, async_finish, allocate_on_comm_stream)

    @staticmethod
    @once
    def backward(ctx, grad_output, previous_event=None):
        """Gradients of forward's arguments: x first, None otherwise."""
        return ctx.handle.combine_gradient(grad_output, TENSORS), None, None, None, None


def fused_dispatch(
    x, token_indices, token_probs, num_experts, group, async_finish=False, allocate_on_comm_stream=False
):
    """Send every token to the ranks of its experts, under autograd: FusedDispatch.apply, with named arguments.

    x: bf16, fp16 or float32 [T, H]. token_indices: integers [T, K], global expert ids, -1 for none. token_probs:
    float32 [T, K]. num_experts: of all ranks. group: a process group of torch, or a world of epmoe (LocalWorld: lists
    over ranks). Returns (recv_x [N, H], recv_token_indices int64 [N, K] (local ids, -1 elsewhere), recv_token_probs
    float32 [N, K], tokens_per_expert int64 [L] on the CPU, handle); rows by src_rank, then token: their order is not
    free. The host waits for N. async_finish, allocate_on_comm_stream: change nothing; results are in the order of
    torch's current stream. Gradients: x and token_probs. Errors: EPValueError, PeerTimeout. Source: the fused_a2a page
    (docs/pages.md); values and gradients to the bit: epmoe_ref.fused_a2a.dispatch_forward, dispatch_backward.
    """
    call = way_of(FusedDispatch, x, token_probs)
    return call(x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream)


def fused_dispatch_on_device(x, token_indices, token_probs, num_experts, group):
    """fused_dispatch in which the host never waits: results have R * T rows, of which the first N hold tokens.

    N is the sum of handle.recv_count, int32 [R] on the device. Later rows hold anything, in forward and backward: mask
    them before and after your experts, or the experts' gradients are wrong (docs/torch.md has the lines).
    Arguments, gradients and errors as in fused_dispatch; tokens_per_expert stays on the device. A graph can capture it.
    """
    call = way_of(FusedDispatchOnDevice, x, token_probs)
    return call(x, token_indices, token_probs, num_experts, group)


def fused_combine(x, group, handle, async_finish=False, allocate_on_comm_stream=False):
    """Send rows back to their tokens' ranks and sum them, under autograd: FusedCombine.apply, with named arguments.

    x: [N, H] in dispatch's row order, bf16, fp16 or float32, weighted and summed over the rank's experts. handle: from
    fused_dispatch. Returns (combined_x [T, H], None): the sum over the token's ranks ascending, in float32, rounded
    once. async_finish, allocate_on_comm_stream: change nothing. The second result, upstream's event, is None, since the
    sum is in the order of torch's current stream. Gradient: x. Errors: EPValueError, PeerTimeout. Source: the fused_a2a
    page (docs/pages.md); epmoe_ref.fused_a2a.combine_forward.
    """
    call = way_of(FusedCombine, x)
    return call(x, group, handle, async_finish, allocate_on_comm_stream)
