"""One round of each family on the device, forward and backward, held against epmoe_ref.fused_a2a to the bit."""

from rows_group import BF16, FP16, FP32, assert_same, host

from epmoe import fused_a2a
from epmoe_ref import fused_a2a as reference

NAMES = ("recv_x", "recv_token_indices", "recv_token_probs", "tokens_per_expert")


def equal_rows(group, world, rng, dtype=BF16, hidden=None, **flags):
    """FusedDispatch and FusedCombine; gradients of random numbers. world: a RowsWorld; flags: of both forward functions.

    hidden: of the rows that combine sums, by chance if left out: it need not be dispatch's.
    """
    *want, known = reference.dispatch_forward(**vars(world))
    ctx = fused_a2a.Context()
    *got, handle = fused_a2a.FusedDispatch.forward(
        ctx, world.x, world.token_indices, world.token_probs, world.num_experts, group, **flags
    )
    for name, one, other in zip(NAMES, got, want):
        assert_same(one, other, name)
    hidden = hidden or 8 * int(rng.integers(1, 4))
    grad = [rng.standard_normal((n, hidden)).astype(dtype) for n in known.num_rows]
    probs = [rng.standard_normal(a.shape).astype(FP32) for a in want[2]]
    made = fused_a2a.FusedDispatch.backward(ctx, grad, None, probs, None, None)
    grad_x, grad_probs = reference.dispatch_backward(known, grad, probs)
    assert_same(made[0], grad_x, "grad of x")
    assert_same(made[2], grad_probs, "grad of token_probs")
    assert [m is None for m in made] == [False, True, False, True, True, True, True]

    ctx = fused_a2a.Context()
    combined, event = fused_a2a.FusedCombine.forward(ctx, grad, group, handle, **flags)
    assert_same(combined, reference.combine_forward(grad, known), "combined_x")
    back = fused_a2a.FusedCombine.backward(ctx, combined)
    assert_same(back[0], reference.combine_backward(known, host(combined)), "grad of combine's x")
    assert event is None and back[1:] == (None,) * 4
    return got, handle


def equal_hybrid(group, world, rng, dtype=FP16, hidden=None, **num_sms):
    """HybridEPDispatch and HybridEPCombine; gradients of random numbers, NaN in rows that must not be read."""
    group.p2p_world_size = world.p2p_world_size
    fused_a2a.buffers.hybrid_ep_buffer(group).fp8_dispatch = world.fp8_dispatch
    *want, known = reference.hybrid_dispatch_forward(**vars(world))
    ctx = fused_a2a.Context()
    *got, handle = fused_a2a.HybridEPDispatch.forward(
        ctx,
        world.x,
        world.routing_map,
        world.probs,
        group,
        world.num_local_experts,
        num_permuted_tokens=world.num_permuted_tokens,
        pad_multiple=world.pad_multiple,
        **num_sms,
    )
    for name, one, other in zip(("hidden", "probs", "scaling_factor", "tokens_per_expert"), got, want):
        assert_same(one, other, name)
    assert_same(handle.overflow, known.overflow, "overflow")
    hidden = hidden or 8 * int(rng.integers(1, 4))
    grad = [rng.standard_normal((n, hidden)).astype(dtype) for n in known.num_rows]
    probs = [rng.standard_normal(n).astype(FP32) for n in known.num_rows]
    for rows, numbers, source in zip(grad, probs, known.src_rank):
        rows[source < 0], numbers[source < 0] = float("nan"), float("nan")
    made = fused_a2a.HybridEPDispatch.backward(ctx, grad, probs, None, None, None)
    grad_x, grad_probs = reference.hybrid_dispatch_backward(known, grad, probs)
    assert_same(made[0], grad_x, "grad of x")
    assert_same(made[2], grad_probs, "grad of probs")
    assert [m is None for m in made] == [False, True, False] + [True] * 6

    ctx = fused_a2a.Context()
    combined = fused_a2a.HybridEPCombine.forward(ctx, grad, handle, known.num_rows, world.pad_multiple)
    assert_same(combined, reference.hybrid_combine_forward(grad, known), "combined_x")
    back = fused_a2a.HybridEPCombine.backward(ctx, combined)
    assert_same(back[0], reference.hybrid_combine_backward(known, host(combined)), "grad of combine's x")
    assert back[1:] == (None, None, None)
    return got, handle


def rows_round(group, x, ids, probs, num_experts, dispatch=fused_a2a.FusedDispatch):
    """All results of one forward and backward of FusedDispatch and FusedCombine, as NumPy."""
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    recv_x, indices, recv_probs, per_expert, handle = dispatch.forward(ctx, x, ids, probs, num_experts, group)
    combined, _ = fused_a2a.FusedCombine.forward(other, recv_x, group, handle)
    back = fused_a2a.FusedCombine.backward(other, combined)[0]
    grads = dispatch.backward(ctx, back, None, recv_probs, None, None)
    return host([recv_x, indices, recv_probs, per_expert, combined, back, grads[0], grads[2]])


def hybrid_round(group, x, maps, probs, num_local_experts):
    """All results of one forward and backward of HybridEPDispatch and HybridEPCombine, as NumPy."""
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    hidden, row_probs, _, per_expert, handle = fused_a2a.HybridEPDispatch.forward(
        ctx, x, maps, probs, group, num_local_experts
    )
    combined = fused_a2a.HybridEPCombine.forward(other, hidden, handle)
    back = fused_a2a.HybridEPCombine.backward(other, combined)[0]
    grads = fused_a2a.HybridEPDispatch.backward(ctx, back, row_probs, None, None, None)
    return host([hidden, row_probs, per_expert, combined, back, grads[0], grads[2]])
