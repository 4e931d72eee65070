"""The kernels of fused_a2a for one shape, compiled before ranks wait for each other, by as many processes as they are.

`EPMOE_DEVICE=gpu python rows_kernels.py RANKS HIDDEN LOCAL TOP_K TOKENS 9 0 I/N`: every Nth of them, into the disk
cache, for compute capability 9.0; needs no GPU. TOKENS: of a rank, at most.
"""

import sys

import ml_dtypes
import numpy as np

from epmoe import device, fused_a2a
from epmoe.fused_a2a.launches import smaller_blocks
from epmoe.host import compiling
from epmoe.kernels.rows.shape import NO_LIMIT, TUNING
from epmoe.worlds.dry import DryWorld

BF16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
MOST_TOKENS, FP8_HIDDEN = 4, 128


def kernels_of(n_ranks, hidden, local, top_k, most_tokens=MOST_TOKENS):
    """What every call on bfloat16 rows launches, forward and backward; with probs, and FP8 of FP8_HIDDEN elements."""
    made = {}
    for n in {_kind(n, n_ranks): n for n in range(most_tokens, 0, -1)}.values():
        world = DryWorld(n_ranks)
        _call_everything(world, hidden, local, top_k, n)
        made |= dict.fromkeys(world.machine.kernels)
    return list(made)


def _kind(n_tokens, n_ranks):
    """What the number of a rank's tokens decides about its kernels."""
    small = TUNING.most_small(n_ranks, NO_LIMIT)
    few = TUNING.few_to_expand[0], small, TUNING.many_to_expand[0] - 1
    return smaller_blocks(TUNING, n_tokens, n_tokens <= small), *(n_tokens <= most for most in few)


def _call_everything(world, hidden, local, top_k, n_tokens):
    n_experts = local * world.n_ranks
    ids = np.tile(np.arange(top_k), (n_tokens, 1))
    probs, dense = np.ones((n_tokens, top_k), FP32), np.ones((n_tokens, n_experts), FP32)
    x, goes = np.zeros((n_tokens, hidden), BF16), np.ones((n_tokens, n_experts), bool)
    for dispatch in (fused_a2a.FusedDispatch, fused_a2a.FusedDispatchOnDevice):
        ctx, other = fused_a2a.Context(), fused_a2a.Context()
        rows, _, row_probs, _, handle = dispatch.forward(ctx, x, ids, probs, n_experts, world)
        fused_a2a.FusedCombine.forward(other, rows, world, handle)
        fused_a2a.FusedCombine.backward(other, x)
        dispatch.backward(ctx, rows, None, row_probs, None, None)
    for budget, num_sms in ((None, 24), (n_tokens, 24), (n_tokens, None)):
        if budget:
            # else the host would look
            fused_a2a.init_hybrid_ep_buffer(world, hidden, n_tokens, local, 24, 24, False)
        ctx, other = fused_a2a.Context(), fused_a2a.Context()
        rows, row_probs, _, _, handle = fused_a2a.HybridEPDispatch.forward(
            ctx, x, goes, dense, world, local, num_sms, num_sms, budget
        )
        fused_a2a.HybridEPCombine.forward(other, rows, handle)
        fused_a2a.HybridEPCombine.backward(other, x)
        fused_a2a.HybridEPDispatch.backward(ctx, rows, row_probs, None, None, None)
    fused_a2a.init_hybrid_ep_buffer(world, FP8_HIDDEN, n_tokens, local, 24, 24, True)
    x = np.zeros((n_tokens, FP8_HIDDEN), BF16)
    rows, *_ = fused_a2a.hybrid_ep_dispatch(x, goes, None, world, local, None, None)
    values = np.zeros((n_tokens, FP8_HIDDEN), rows.dtype), np.ones((n_tokens, 1), FP32)
    fused_a2a.fused_dispatch(values, ids, probs, n_experts, world)


def compile_ahead(world, hidden, local, top_k, most_tokens=MOST_TOKENS):
    """Compile what the disk cache lacks, from rank 0 while the others wait; collective. Nothing in the simulator."""
    if device.SIM:
        return
    shape = world.n_ranks, hidden, local, top_k, most_tokens
    command = [sys.executable, __file__, *map(str, (*shape, *world.machine.compute_capability))]
    compiling.ahead(world, ("rows", shape), lambda: kernels_of(*shape), command)


def main(n_ranks, hidden, local, top_k, most_tokens, major, minor, part):
    shape, cc = map(int, (n_ranks, hidden, local, top_k, most_tokens)), (int(major), int(minor))
    i, n = map(int, part.split("/"))
    for kernel in kernels_of(*shape)[i - 1 :: n]:
        kernel.binary(cc)


if __name__ == "__main__":
    main(*sys.argv[1:])
