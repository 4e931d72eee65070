"""One rank of several, each on a GPU: rows against torch's own index_select, all_to_all_single and index_add."""

import os
import sys

import torch
import torch.distributed as dist

from epmoe.torch import fused_combine, fused_dispatch
from epmoe.worlds.mpi import MPIWorld


def exchanged(rows, sent, received):
    """The rows that all ranks sent to this one, by source rank."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class ByAllToAll:
    """The layout of one batch, computed with torch alone."""

    def __init__(self, ids, n_ranks, n_local):
        rank_of = torch.where(ids >= 0, ids // n_local, -1)
        goes = torch.stack([(rank_of == rank).any(dim=1) for rank in range(n_ranks)])
        self.token = torch.cat([row.nonzero()[:, 0] for row in goes])
        counts = goes.sum(dim=1)
        self.sent = counts.tolist()
        self.received = exchanged(counts, [1] * n_ranks, [1] * n_ranks).tolist()

    def dispatch(self, x):
        return exchanged(x.index_select(0, self.token), self.sent, self.received)

    def combine(self, rows, n_tokens):
        out = rows.new_zeros((n_tokens, rows.shape[1]), dtype=torch.float32)
        return out.index_add(0, self.token, exchanged(rows, self.received, self.sent).float())


def main(n_tokens, hidden, n_local, top_k):
    """Raises where a rank differs: rows not at all, sums by more than their rounding to bfloat16."""
    world = MPIWorld(timeout=120)
    gpu = world.machine.ordinal
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK=str(world.rank),
                      WORLD_SIZE=str(world.n_ranks))
    dist.init_process_group("nccl", device_id=torch.device("cuda", gpu))
    rng = torch.Generator("cuda").manual_seed(world.rank)
    n = n_tokens - world.rank
    x = torch.randn(n, hidden, device="cuda", generator=rng).bfloat16().requires_grad_()
    ids = torch.rand(n, n_local * world.n_ranks, device="cuda", generator=rng).topk(top_k).indices
    ids = torch.where(torch.rand(ids.shape, device="cuda", generator=rng) < 0.1, -1, ids)
    probs = torch.rand(n, top_k, device="cuda", generator=rng)

    rows, _, _, _, handle = fused_dispatch(x, ids, probs, n_local * world.n_ranks, world)
    other = ByAllToAll(ids, world.n_ranks, n_local)
    assert torch.equal(rows, other.dispatch(x.detach()))
    combined, _ = fused_combine(rows, world, handle)
    torch.testing.assert_close(combined, other.combine(rows.detach(), n).bfloat16(), rtol=1.6e-2, atol=1e-5)
    gradient = torch.randn(n, hidden, device="cuda", generator=rng).bfloat16()
    combined.backward(gradient)
    there = other.combine(other.dispatch(gradient), n).bfloat16()
    torch.testing.assert_close(x.grad, there, rtol=1.6e-2, atol=1e-5)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print(f"rank {world.rank} of {world.n_ranks}: equal", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
