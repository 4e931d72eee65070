"""One rank of an MPIWorld or a ShmemWorld: rounds of fused_a2a, forward and backward, equal to the reference."""

import sys
import time

import numpy as np
from of_one_rank import hybrid_received, order_tells, receiving, returning, rows_received
from rows_group import assert_same, host, routing, tokens
from rows_kernels import compile_ahead

from epmoe import MPIWorld, ShmemWorld, fused_a2a
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPValueError

TOP_K = 8
FEW = 600  # tokens of a rank in rounds after the first, at most; on 2 GPUs Lamport rows carry up to 512
ALL_SMS = {"num_sms_dispatch_api": None, "num_sms_combine_api": None}


def rows_round(world, rng, num_tokens, hidden, local):
    """FusedDispatch and FusedCombine, and both gradients; then the dispatch without a wait of the host."""
    me, num_experts = world.rank, local * world.n_ranks
    ids, probs = routing(rng, num_tokens, num_experts, min(TOP_K, num_experts))
    x = order_tells(rng, num_tokens, hidden)
    want, known = rows_received(x, ids, probs, num_experts, me)
    here, mine = receiving(known, me), returning(known, me)
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.FusedDispatch.forward(ctx, x[me], ids[me], probs[me], num_experts, world)
    assert_same(got, want, "dispatch")
    rows = order_tells(rng, known.num_rows, hidden)
    combined, _ = fused_a2a.FusedCombine.forward(other, rows[me], world, handle)
    assert_same(combined, reference.combine_forward(rows, mine)[0], "combine")
    row_probs = [rng.random((n, known.top_k), np.float32) for n in known.num_rows]
    grad_x, _, grad_probs, *_ = fused_a2a.FusedDispatch.backward(ctx, rows[me], None, row_probs[me], None, None)
    assert_same(grad_x, host(combined), "gradient of x, which is the sum that combine makes of such rows")
    assert_same(grad_probs, reference.dispatch_backward(mine, narrow(rows), row_probs)[1][0], "gradient of probs")
    grad = order_tells(rng, num_tokens, hidden)
    back = fused_a2a.FusedCombine.backward(other, grad[me])[0]
    assert_same(back, reference.combine_backward(here, grad)[0], "rows")

    *got, handle = fused_a2a.fused_dispatch_on_device(x[me], ids[me], probs[me], num_experts, world)
    n = len(want[0])
    assert_same([host(a)[:n] for a in got[:3]] + got[3:], want, "dispatch without a wait")
    padded = np.full((len(got[0]), hidden), np.nan, rows[me].dtype)
    padded[:n] = rows[me]
    assert_same(fused_a2a.fused_combine(padded, world, handle)[0], host(combined), "combine without a wait")


def narrow(rows):
    """The first vector of each row."""
    return [a[:, :8] for a in rows]


def hybrid_round(world, rng, num_tokens, hidden, local, sms=None, **options):
    """HybridEPDispatch, HybridEPCombine and both gradients; as many experts a token as rows have, about.

    sms: ALL_SMS, or None for the default. options: what the reference has too.
    """
    me, num_experts = world.rank, local * world.n_ranks
    ids, _ = routing(rng, num_tokens, num_experts, min(TOP_K, num_experts))
    maps = [(a[:, :, None] == np.arange(num_experts)).any(axis=1) for a in ids]
    probs, x = [rng.random(m.shape, np.float32) for m in maps], order_tells(rng, num_tokens, hidden)
    want, known = hybrid_received(x, maps, probs, local, me, **options)
    here, mine = receiving(known, me), returning(known, me)
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    given = x[me], maps[me], probs[me], world, local
    *got, handle = fused_a2a.HybridEPDispatch.forward(ctx, *given, **options, **(sms or {}))
    assert_same(got, want, "dispatch by expert")
    assert_same(handle.overflow, known.overflow[me], "overflow")
    rows = order_tells(rng, known.num_rows, hidden)
    combined = fused_a2a.HybridEPCombine.forward(other, rows[me], handle)
    assert_same(combined, reference.hybrid_combine_forward(rows, mine)[0], "combine by expert")
    row_probs = [rng.random(n, np.float32) for n in known.num_rows]
    grad_x, _, grad_probs, *_ = fused_a2a.HybridEPDispatch.backward(ctx, rows[me], row_probs[me], None, None, None)
    assert_same(grad_x, host(combined), "gradient of x by expert")
    wanted = reference.hybrid_dispatch_backward(mine, narrow(rows), row_probs)[1][0]
    assert_same(grad_probs, wanted, "gradient of probs by expert")
    grad = order_tells(rng, num_tokens, hidden)
    back = fused_a2a.HybridEPCombine.backward(other, grad[me])[0]
    assert_same(back, reference.hybrid_combine_backward(here, grad)[0], "rows by expert")


def blockwise_fp8_round(world, rng, num_tokens, local):
    """Encoded by the sender, and given as pairs."""
    me, num_experts, hidden = world.rank, local * world.n_ranks, 128
    ids, probs = routing(rng, num_tokens, num_experts, min(TOP_K, num_experts))
    maps = [(a[:, :, None] == np.arange(num_experts)).any(axis=1) for a in ids]
    x = tokens(rng, num_tokens, hidden)
    fused_a2a.init_hybrid_ep_buffer(world, hidden, max(num_tokens), local, 24, 24, True)
    *want, _ = reference.hybrid_dispatch_forward(x, maps, None, local, fp8_dispatch=True)
    *got, _ = fused_a2a.hybrid_ep_dispatch(x[me], maps[me], None, world, local, **ALL_SMS)
    assert_same(got, [None if of_all is None else of_all[me] for of_all in want], "blockwise FP8 by expert")
    pairs = list(zip(want[0], want[2]))  # rows in the place of tokens
    ids = [np.argsort(rng.random((len(a), num_experts)), axis=1)[:, : min(TOP_K, num_experts)] for a in want[0]]
    probs = [rng.random(a.shape, np.float32) for a in ids]
    *want, _ = reference.dispatch_forward(pairs, ids, probs, num_experts)
    *got, _ = fused_a2a.fused_dispatch(pairs[me], ids[me], probs[me], num_experts, world)
    assert_same(got, [of_all[me] for of_all in want], "pairs of blockwise FP8")


def several_p2p_worlds_are_refused():
    """What lies in another p2p world cannot be written."""
    try:
        fused_a2a.get_buffer(ShmemWorld(p2p_world_size=1), 0)
    except EPValueError as error:
        assert "p2p_world_size=1" in str(error)
    else:
        raise AssertionError("a Buffer between p2p worlds")


def main(most_tokens, hidden, local, rounds, kind="MPIWorld"):
    """Every rank draws the same numbers, and looks at its own part of the results. Only the first round is large."""
    world = {"MPIWorld": MPIWorld, "ShmemWorld": ShmemWorld}[kind]()
    rng, start = np.random.default_rng(1), time.perf_counter()
    if kind == "ShmemWorld":
        several_p2p_worlds_are_refused()

    def say(what):
        if world.rank == 0:
            print(f"{time.perf_counter() - start:.1f} s: {what}", flush=True)

    compile_ahead(world, hidden, local, min(TOP_K, local * world.n_ranks), most_tokens)
    say("compiled")
    for number in range(rounds):
        num_tokens = [most_tokens] * world.n_ranks
        if number > 0:
            num_tokens = rng.integers(0, min(FEW, most_tokens) + 1, world.n_ranks).tolist()
        rows_round(world, rng, num_tokens, hidden, local)
        say(f"rows of {num_tokens} tokens")
        hybrid_round(world, rng, num_tokens, hidden, local)
        say("rows by expert, as many as there are")
        if number == 0:
            fused_a2a.init_hybrid_ep_buffer(world, hidden, most_tokens, local, 24, 24, False)
        # about as many rows as a rank gets, since routing drops a fifth: some ranks have room for all, others have not
        num_rows = sum(num_tokens) * min(TOP_K, local * world.n_ranks) * 4 // (5 * world.n_ranks)
        hybrid_round(world, rng, num_tokens, hidden, local, ALL_SMS, num_permuted_tokens=num_rows, pad_multiple=4)
        say(f"{num_rows} rows by expert, with all SMs")
    blockwise_fp8_round(world, rng, [min(FEW, most_tokens - rank % 2) for rank in range(world.n_ranks)], local)
    fused_a2a.reset_hybrid_ep_buffer(world)
    fused_a2a.get_buffer(world, 0).close()
    print(f"rank {world.rank} of {world.n_ranks}: equal", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), *sys.argv[5:])
