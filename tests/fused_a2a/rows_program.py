"""One rank of an MPIWorld: rounds of fused_a2a with uneven ranks, each equal to the reference on this rank."""

import sys

import numpy as np
from rows_group import assert_same, host, routing, tokens

from epmoe import fused_a2a
from epmoe.worlds.mpi import MPIWorld
from epmoe_ref import fused_a2a as reference


def rows_round(world, rng, num_tokens, hidden, local):
    """FusedDispatch, FusedCombine and both gradients."""
    me, num_experts = world.rank, local * world.n_ranks
    ids, probs = routing(rng, num_tokens, num_experts, min(8, num_experts))
    x = tokens(rng, num_tokens, hidden)
    *want, known = reference.dispatch_forward(x, ids, probs, num_experts)
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.FusedDispatch.forward(ctx, x[me], ids[me], probs[me], num_experts, world)
    for one, of_all in zip(got, want):
        assert_same(one, of_all[me], "dispatch")
    combined, _ = fused_a2a.FusedCombine.forward(other, got[0], world, handle)
    assert_same(combined, reference.combine_forward(want[0], known)[me], "combine")
    grad_x, _, grad_probs, *_ = fused_a2a.FusedDispatch.backward(ctx, got[0], None, got[2], None, None)
    wanted = reference.dispatch_backward(known, want[0], want[2])
    assert_same(grad_x, wanted[0][me], "gradient of x")
    assert_same(grad_probs, wanted[1][me], "gradient of probs")
    back = fused_a2a.FusedCombine.backward(other, host(x[me]))[0]
    assert_same(back, reference.combine_backward(known, x)[me], "rows")


def hybrid_round(world, rng, num_tokens, hidden, local, **options):
    """HybridEPDispatch, HybridEPCombine and both gradients."""
    me = world.rank
    maps = [rng.random((n, local * world.n_ranks)) < 0.4 for n in num_tokens]
    probs, x = [rng.random(m.shape, np.float32) for m in maps], tokens(rng, num_tokens, hidden)
    *want, known = reference.hybrid_dispatch_forward(x, maps, probs, local, **options)
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.HybridEPDispatch.forward(ctx, x[me], maps[me], probs[me], world, local, **options)
    for one, of_all in zip(got, want):
        assert_same(one, None if of_all is None else of_all[me], "dispatch by expert")
    assert_same(handle.overflow, known.overflow[me], "overflow")
    combined = fused_a2a.HybridEPCombine.forward(other, got[0], handle)
    assert_same(combined, reference.hybrid_combine_forward(want[0], known)[me], "combine by expert")
    grad_x, _, grad_probs, *_ = fused_a2a.HybridEPDispatch.backward(ctx, got[0], got[1], None, None, None)
    wanted = reference.hybrid_dispatch_backward(known, want[0], want[1])
    assert_same(grad_x, wanted[0][me], "gradient of x by expert")
    assert_same(grad_probs, wanted[1][me], "gradient of probs by expert")
    back = fused_a2a.HybridEPCombine.backward(other, x[me])[0]
    assert_same(back, reference.hybrid_combine_backward(known, x)[me], "rows by expert")


def main(most_tokens, hidden, local, rounds):
    """Every rank draws the same numbers, and looks at its own part of the results."""
    world, rng = MPIWorld(), np.random.default_rng(1)
    for number in range(rounds):
        num_tokens = rng.integers(0, most_tokens + 1, world.n_ranks).tolist()
        rows_round(world, rng, num_tokens, hidden, local)
        hybrid_round(world, rng, num_tokens, hidden, local)
        if number == 0:
            fused_a2a.init_hybrid_ep_buffer(world, hidden, most_tokens, local, 24, 24, False)
        hybrid_round(world, rng, num_tokens, hidden, local, num_permuted_tokens=most_tokens * local, pad_multiple=4)
    fused_a2a.reset_hybrid_ep_buffer(world)
    fused_a2a.get_buffer(world, 0).close()
    print(f"rank {world.rank} of {world.n_ranks}: equal", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
