"""One rank of a world that disagrees on configuration and kernels; every rank must say which field differs where."""

from rank_arrays import config

from epmoe import EPValueError, ExpertParallel, MPIWorld


def main():
    world = MPIWorld()
    cfg = config(world.n_ranks, combine_dtype="fp32" if world.rank == world.n_ranks - 1 else "bf16")
    try:
        ExpertParallel(cfg, world, timeout=30)
    except EPValueError as error:
        print(f"rank {world.rank} refuses: {error}\n", end="", flush=True)
    try:
        ExpertParallel(config(world.n_ranks), world, fused=world.rank != 0)
    except EPValueError as error:
        print(f"rank {world.rank} splits: {error}\n", end="", flush=True)
    try:
        ExpertParallel(config(world.n_ranks + 1), world)
    except EPValueError as error:
        print(f"rank {world.rank} counts: {error}\n", end="", flush=True)
    with ExpertParallel(config(world.n_ranks), world):
        print(f"rank {world.rank} goes on\n", end="", flush=True)


main()
