"""What programs of several ranks share: where tensors lie, and the phases that have ended, should one be stopped."""

import time

import torch

from epmoe import device
from epmoe.torch import get_buffer, reset_hybrid_ep_buffer

START = time.perf_counter()


def device_of(ordinal):
    """torch's device of this rank, which is the current one from here on."""
    if device.SIM:
        return torch.device("cpu")
    where = torch.device("cuda", int(ordinal()))
    torch.cuda.set_device(where)
    return where


def expert_output(rows, weights):
    """What stands for a rank's experts: rows [N, H] scaled by [N]."""
    return (rows * weights.unsqueeze(1)).to(rows.dtype)


def say(rank, what):
    """One line of rank 0."""
    if rank == 0:
        print(f"{time.perf_counter() - START:.1f} s: {what}", flush=True)


def end(world):
    """Free what the fused_a2a functions hold for a world, and say that all was as wanted."""
    reset_hybrid_ep_buffer(world)
    get_buffer(world, 0).close()
    print(f"rank {world.rank} of {world.n_ranks}: as wanted", flush=True)
