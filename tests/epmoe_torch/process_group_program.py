"""One rank of a torch.distributed process group, which is Megatron's `group` as it is: its calls with exact results.

torchrun starts it, or anything else that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import os
import sys

import torch
import torch.distributed as dist
from megatron_managers import DeepepManager, HybridEPManager, LaterHybridEPManager, layer
from phases import device_of, say
from rows_kernels import compile_ahead

from epmoe import device
from epmoe.torch import (
    ProcessGroupWorld,
    fused_dispatch,
    get_buffer,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
)
from epmoe.torch.process_group import world_of

LOCAL, TOP_K = 2, 2
BF16 = torch.bfloat16


def experts_of(rank, counts_on="cpu"):
    """Expert e multiplies its rows by e + 1. counts_on: the kind of device that tokens_per_expert is on."""

    def experts(rows, tokens_per_expert, probs):
        assert (tokens_per_expert.dtype, tokens_per_expert.device.type) == (torch.int64, counts_on)
        tokens_per_expert = tokens_per_expert.cpu()
        assert (probs.dtype, probs.device, rows.dtype) == (torch.float32, rows.device, BF16)
        factors = torch.arange(1, LOCAL + 1) + LOCAL * rank
        factors = torch.repeat_interleave(factors, tokens_per_expert)
        factors = torch.nn.functional.pad(factors, (0, len(rows) - len(factors))).to(rows.device)
        return (rows * (factors * probs).unsqueeze(1)).to(rows.dtype)

    return experts


def routing(n_tokens, n_experts, where, shift, each):
    """routing_map [T, E] with `each` experts a token, evenly, and probs that are powers of two."""
    token, k = torch.meshgrid(torch.arange(n_tokens), torch.arange(each), indexing="ij")
    routing_map = torch.zeros(n_tokens, n_experts, dtype=torch.bool, device=where)
    routing_map[token, (token + k + shift) % n_experts] = True
    probs = 2.0 ** -(1 + torch.arange(n_tokens * n_experts, device=where).reshape(n_tokens, n_experts) % 2)
    return routing_map, probs * routing_map


def megatron_calls(group, manager, where, hidden, *, through=layer, shared=False):
    """One layer and its gradients: whole numbers and powers of two, so that every sum is exact."""
    rank, n_experts, shape = group.rank(), LOCAL * group.size(), (num_tokens(group), 1, hidden)
    draw = torch.Generator().manual_seed(rank)
    x, grad = (torch.randint(-3, 4, shape, generator=draw).to(where, BF16) for _ in range(2))
    routing_map, probs = routing(shape[0], n_experts, where, rank, TOP_K)
    x.requires_grad_(), probs.requires_grad_()
    more = torch.ones(shape[0], hidden, dtype=BF16, device=where) if shared else None
    counts_on = "cpu" if getattr(manager, "budget", None) is None else where.type
    out = through(manager, x * 1, routing_map, probs, experts_of(rank, counts_on), more)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    out.backward(grad)
    factors = torch.arange(1, n_experts + 1, device=where) * routing_map
    weight = (factors * probs).sum(1).detach()[:, None, None]
    assert torch.equal(out.float(), x.float() * weight + shared)
    assert torch.equal(x.grad.float(), grad.float() * weight)
    assert torch.equal(probs.grad, factors * (x.float() * grad.float()).sum((1, 2))[:, None])


def num_tokens(group):
    """Tokens of a rank: two rounds of the experts, so that every expert gets as many."""
    return 2 * LOCAL * group.size()


def all_megatron_calls(group, where, hidden):
    """Both managers, as they are configured without and with a capacity."""
    n_experts = LOCAL * group.size()
    for capacity_factor in (None, 1.0):
        manager = DeepepManager(group, LOCAL, TOP_K, n_experts, capacity_factor=capacity_factor)
        megatron_calls(group, manager, where, hidden, shared=True)
    for capacity in (None, 4):
        manager = HybridEPManager(group, LOCAL, n_experts, capacity=capacity)
        for _ in range(2):
            megatron_calls(group, manager, where, hidden)
    for budget in (None, TOP_K * num_tokens(group)):
        manager = LaterHybridEPManager(group, LOCAL, n_experts, budget)
        megatron_calls(group, manager, where, hidden)
        assert manager.over_budget.tolist() == [False]


def groups_of_its_own(where, hidden):
    """Each rank in a group of itself, in turn with the group of all: every token comes back as it was."""
    all_of_them = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = all_of_them[dist.get_rank()]
    routing_map, probs = routing(3, LOCAL, where, 0, 1)
    x = torch.ones(3, hidden, dtype=BF16, device=where)
    for group in (own, dist.group.WORLD, own):
        ids = torch.tensor([[group.rank() * LOCAL, -1]] * 3, device=where)
        rows, *_ = fused_dispatch(x, ids, probs, LOCAL * group.size(), group)
        assert torch.equal(rows, x)
    rows, *_, counts, _ = hybrid_ep_dispatch(x, routing_map, probs, own, LOCAL)
    assert torch.equal(rows, x) and int(counts.sum()) == 3
    reset_hybrid_ep_buffer(own)
    get_buffer(own, 0).close()


def main(hidden):
    where = device_of(lambda: os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo" if device.SIM else "nccl")
    group = dist.group.WORLD
    world = ProcessGroupWorld()
    assert world_of(group) is world and (world.rank, world.size()) == (dist.get_rank(), dist.get_world_size())
    say(world.rank, "met")
    compile_ahead(world, hidden, LOCAL, TOP_K, num_tokens(group))
    say(world.rank, "compiled")
    init_hybrid_ep_buffer(group, hidden, 8, LOCAL, 24, 24, False)
    all_megatron_calls(group, where, hidden)
    say(world.rank, "Megatron's calls")
    groups_of_its_own(where, hidden)
    say(world.rank, "groups of a rank")
    assert "mpi4py.MPI" not in sys.modules
    reset_hybrid_ep_buffer(group)
    get_buffer(group, 0).close()
    dist.destroy_process_group()
    print(f"rank {world.rank} of {world.n_ranks}: as wanted", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
