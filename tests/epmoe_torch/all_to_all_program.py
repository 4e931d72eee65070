"""One rank of an MPIWorld: fused_a2a against torch's own index_select, all_to_all_single and index_add.

Rows equal the others to the bit. Sums are compared with sums in float32, of which each bfloat16 result may be away by
its own rounding, and for rows by expert also by those of the sums of the ranks.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from phases import device_of, end, expert_output, say
from rows_kernels import compile_ahead

from epmoe import device
from epmoe.torch import fused_combine, fused_dispatch, hybrid_ep_combine, hybrid_ep_dispatch
from epmoe.worlds.mpi import MPIWorld

# of a float32 to bfloat16; of a sum in float32, in either order
ROUNDING, FLOAT32_ROUNDING = 2**-8, 2**-23
BF16 = torch.bfloat16


def exchanged(rows, sent, received):
    """The rows that all ranks sent to this one, by src_rank; through the host, unless NCCL takes them."""
    here = rows.contiguous() if dist.get_backend() == "nccl" else rows.cpu().contiguous()
    out = here.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, here, received, sent)
    return out.to(rows.device)


class ByAllToAll:
    """Rows of one batch by torch alone. goes: bool [T, R * G], where tokens go; rows of a rank by group of G."""

    def __init__(self, goes, n_ranks):
        self.n_tokens, n_groups = len(goes), goes.shape[1] // n_ranks
        self.token = goes.T.nonzero()[:, 1]
        counts = goes.sum(dim=0).reshape(n_ranks, n_groups)
        arriving = exchanged(counts, [1] * n_ranks, [1] * n_ranks)
        self.sent, self.received = counts.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        group = torch.arange(n_groups, device=goes.device).repeat(n_ranks).repeat_interleave(arriving.flatten())
        self.order = group.argsort(stable=True)

    def dispatch(self, x):
        """Rows of x [T, ...] that arrive here, by group, src_rank, token."""
        return exchanged(x.index_select(0, self.token), self.sent, self.received)[self.order]

    def combine(self, rows):
        """Sums of rows by token, in float32."""
        back = torch.empty_like(rows)
        back[self.order] = rows
        out = rows.new_zeros((self.n_tokens, *rows.shape[1:]), dtype=torch.float32)
        return out.index_add(0, self.token, exchanged(back, self.received, self.sent).float())


def assert_summed(got, rows, other, roundings):
    """got: the sums of rows, away from those in float32 by no more than so many roundings of the terms."""
    wanted, room = other.combine(rows), other.combine(rows.abs()) * (roundings * ROUNDING * 1.01)
    away = (got.float() - wanted).abs()
    assert got.dtype == BF16 and (away <= room).all(), f"{(away - room).max()} beyond the rounding"


def rows_round(world, x, ids, probs, gradient, n_local):
    """fused_dispatch and fused_combine, forward and backward."""
    n_ranks = world.n_ranks
    rank_of = torch.where(ids >= 0, ids // n_local, -1)
    goes = torch.stack([(rank_of == rank).any(dim=1) for rank in range(n_ranks)], dim=1)
    other = ByAllToAll(goes, n_ranks)
    rows, local_ids, row_probs, per_expert, handle = fused_dispatch(x, ids, probs, n_local * n_ranks, world)
    assert torch.equal(rows, other.dispatch(x.detach()))
    all_ids, here = other.dispatch(ids), other.dispatch(rank_of) == world.rank
    assert torch.equal(local_ids, torch.where(here, all_ids - world.rank * n_local, -1))
    assert torch.equal(row_probs, other.dispatch(probs.detach()) * here)
    assert torch.equal(per_expert, local_ids[here].bincount(minlength=n_local).cpu())
    out, _ = fused_combine(expert_output(rows, row_probs.sum(1)), world, handle)
    out.backward(gradient)

    same, same_probs = rows.detach().requires_grad_(), row_probs.detach().requires_grad_()
    made = expert_output(same, same_probs.sum(1))
    assert_summed(out, made.detach(), other, 1)
    made.backward(other.dispatch(gradient))
    assert_summed(x.grad, same.grad, other, 1)
    away = probs.grad - other.combine(same_probs.grad)
    room = other.combine(same_probs.grad.abs()) * FLOAT32_ROUNDING
    assert (away.abs() <= room * world.n_ranks).all()


def hybrid_round(world, x, goes, probs, gradient, n_local):
    """hybrid_ep_dispatch and hybrid_ep_combine, forward and backward."""
    other = ByAllToAll(goes, world.n_ranks)
    rows, row_probs, _, per_expert, handle = hybrid_ep_dispatch(x, goes, probs, world, n_local)
    assert torch.equal(rows, other.dispatch(x.detach())) and int(per_expert.sum()) == len(rows)
    expert = torch.repeat_interleave(per_expert).to(rows.device) + world.rank * n_local
    all_probs = other.dispatch(probs.detach())
    assert torch.equal(row_probs, all_probs.gather(1, expert.unsqueeze(1))[:, 0])
    out = hybrid_ep_combine(expert_output(rows, row_probs), handle)
    out.backward(gradient)

    same, same_probs = rows.detach().requires_grad_(), row_probs.detach().requires_grad_()
    made = expert_output(same, same_probs)
    assert_summed(out, made.detach(), other, 2)
    made.backward(other.dispatch(gradient))
    assert_summed(x.grad, same.grad, other, 2)
    of_experts = torch.zeros_like(all_probs).scatter(1, expert.unsqueeze(1), same_probs.grad.unsqueeze(1))
    assert torch.equal(probs.grad, other.combine(of_experts))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main(n_tokens, hidden, n_local, top_k):
    """Raises where a rank differs."""
    world = MPIWorld(timeout=120)
    where = device_of(lambda: world.machine.ordinal)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(world.tell(free_port(), 60.0)[0]),
        RANK=str(world.rank),
        WORLD_SIZE=str(world.n_ranks),
    )
    if device.SIM or torch.cuda.device_count() < world.n_ranks:  # NCCL refuses two ranks on a GPU
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=where)
    compile_ahead(world, hidden, n_local, top_k, n_tokens)
    say(world.rank, "compiled")
    rng = torch.Generator(where).manual_seed(world.rank)
    n, n_experts = n_tokens - world.rank, n_local * world.n_ranks

    def random(*shape):
        return torch.rand(shape, device=where, generator=rng)

    def normal():
        return torch.randn(n, hidden, device=where, generator=rng).to(BF16)

    ids = random(n, n_experts).topk(top_k).indices
    goes = torch.zeros(n, n_experts, dtype=torch.bool, device=where).scatter(1, ids, True)
    ids = torch.where(random(n, top_k) < 0.1, -1, ids)
    rows_round(world, normal().requires_grad_(), ids, random(n, top_k).requires_grad_(), normal(), n_local)
    say(world.rank, "rows")
    hybrid_round(world, normal().requires_grad_(), goes, random(n, n_experts).requires_grad_(), normal(), n_local)
    say(world.rank, "rows by expert")
    dist.destroy_process_group()
    end(world)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
