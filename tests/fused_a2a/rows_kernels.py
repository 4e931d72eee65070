"""The kernels of fused_a2a for one shape, compiled before ranks wait for each other, by as many processes as they are.

`EPMOE_DEVICE=gpu python rows_kernels.py RANKS HIDDEN LOCAL TOP_K 9 0 I/N`: every Nth of them, into the disk cache, for
compute capability 9.0; needs no GPU.
"""

import sys

import ml_dtypes
import numpy as np

from epmoe import compiling, device, fused_a2a
from epmoe.device import kernel_cache
from epmoe.worlds.dry import DryWorld

BF16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TOKENS, FP8_HIDDEN = 4, 128


def kernels_of(n_ranks, hidden, local, top_k, n_sms=132):
    """What every call on bfloat16 rows launches, forward and backward; with probs, and FP8 of FP8_HIDDEN elements."""
    world = DryWorld(n_ranks, n_sms)
    n_experts = local * n_ranks
    ids = np.tile(np.arange(top_k), (TOKENS, 1))
    probs, dense = np.ones((TOKENS, top_k), FP32), np.ones((TOKENS, n_experts), FP32)
    x, goes = np.zeros((TOKENS, hidden), BF16), np.ones((TOKENS, n_experts), bool)
    for dispatch in (fused_a2a.FusedDispatch, fused_a2a.FusedDispatchOnDevice):
        ctx, other = fused_a2a.Context(), fused_a2a.Context()
        rows, _, row_probs, _, handle = dispatch.forward(ctx, x, ids, probs, n_experts, world)
        fused_a2a.FusedCombine.forward(other, rows, world, handle)
        fused_a2a.FusedCombine.backward(other, x)
        dispatch.backward(ctx, rows, None, row_probs, None, None)
    for budget in (None, TOKENS):
        if budget:
            fused_a2a.init_hybrid_ep_buffer(world, hidden, TOKENS, local, 24, 24, False)    # else the host would look
        ctx, other = fused_a2a.Context(), fused_a2a.Context()
        rows, row_probs, _, _, handle = fused_a2a.HybridEPDispatch.forward(ctx, x, goes, dense, world, local,
                                                                           num_permuted_tokens=budget)
        fused_a2a.HybridEPCombine.forward(other, rows, handle)
        fused_a2a.HybridEPCombine.backward(other, x)
        fused_a2a.HybridEPDispatch.backward(ctx, rows, row_probs, None, None, None)
    fused_a2a.init_hybrid_ep_buffer(world, FP8_HIDDEN, TOKENS, local, 24, 24, True)
    rows, _, scales, *_ = fused_a2a.hybrid_ep_dispatch(np.zeros((TOKENS, FP8_HIDDEN), BF16), goes, None, world, local)
    values = np.zeros((TOKENS, FP8_HIDDEN), rows.dtype), np.ones((TOKENS, 1), FP32)
    fused_a2a.fused_dispatch(values, ids, probs, n_experts, world)
    return list(world.machine.kernels)


def compile_ahead(world, hidden, local, top_k):
    """Compile what the disk cache lacks, from rank 0 while the others wait; collective. Nothing in the simulator."""
    if device.SIM:
        return
    if world.rank == 0:
        shape, cc = (world.n_ranks, hidden, local, top_k), world.machine.compute_capability
        missing = sum(not kernel_cache.has(k.fingerprint(cc)) for k in kernels_of(*shape))
        n = compiling.number_of_processes(world, missing) if missing else 0
        compiling.run_together([[sys.executable, __file__, *map(str, (*shape, *cc)), f"{i}/{n}"] for i in range(n)])
    world.tell(None, compiling.TIMEOUT_S + 60)


def main(n_ranks, hidden, local, top_k, major, minor, part):
    shape, cc, (i, n) = map(int, (n_ranks, hidden, local, top_k)), (int(major), int(minor)), map(int, part.split("/"))
    for kernel in kernels_of(*shape)[i::n]:
        kernel.binary(cc)


if __name__ == "__main__":
    main(*sys.argv[1:])
