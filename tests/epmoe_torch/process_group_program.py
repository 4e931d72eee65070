"""One rank of a torch.distributed process group, which is Megatron's `group` as it is: its calls with exact results.

torchrun starts it, or anything else that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import os
import sys

import torch
import torch.distributed as dist
from phases import device_of, say
from ranks_program import LOCAL, TOP_K, all_megatron_calls, routing
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


def groups_of_its_own(where, hidden):
    """Each rank in a group of itself, in turn with the group of all: every token comes back as it was."""
    all_of_them = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = all_of_them[dist.get_rank()]
    routing_map, probs = routing(3, LOCAL, where, 0, 1)
    x = torch.ones(3, hidden, dtype=torch.bfloat16, device=where)
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
    compile_ahead(world, hidden, LOCAL, TOP_K, 2 * LOCAL * world.n_ranks)
    say(world.rank, "compiled")
    init_hybrid_ep_buffer(group, hidden, 8, LOCAL, 24, 24, False)
    all_megatron_calls(group, group.rank(), where, hidden)
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
