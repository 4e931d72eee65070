"""When the phases of a program of several ranks have ended: one that is stopped has told how far it was."""

import time

from epmoe.torch import get_buffer, reset_hybrid_ep_buffer

START = time.perf_counter()


def say(rank, what):
    """One line of rank 0."""
    if rank == 0:
        print(f"{time.perf_counter() - START:.1f} s: {what}", flush=True)


def end(world):
    """Free what the fused_a2a functions hold for a world, and say that all was as wanted."""
    reset_hybrid_ep_buffer(world)
    get_buffer(world, 0).close()
    print(f"rank {world.rank} of {world.n_ranks}: as wanted", flush=True)
