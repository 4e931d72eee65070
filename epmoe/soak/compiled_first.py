"""Compiles the kernels of a soak before its first round, so that compiling does not count in the time of rounds.

`EPMOE_DEVICE=gpu python -m epmoe.soak.compiled_first RUN X.Y I/N` compiles every Nth of them, starting with the Ith,
into the disk cache, for compute capability X.Y. as_words() makes RUN. It needs no GPU.
"""

import json
import sys
from dataclasses import asdict

from epmoe import device
from epmoe.host import compiling
from epmoe.soak.soak import Soak
from epmoe.worlds.dry import DryWorld
from epmoe_ref.config import EPConfig


def compile_all(cfg, world, **options):
    """Compile the kernels of Soak(cfg, world, **options) that the disk cache lacks, and load all; collective.

    options: fused, seed, poison, kernels. Returns (kernels, how many of them other processes compiled, by how many) on
    the host of rank 0; zeros in the simulator, which compiles nothing.
    """
    if device.SIM:
        return 0, 0, 0
    run = as_words(cfg, **options)
    counts = compiling.ahead(
        world,
        ("soak", run),
        lambda: kernels_of(run),
        [sys.executable, "-m", __name__, run, "%d.%d" % world.machine.compute_capability],
    )
    kernels = kernels_of(run)
    for kernel in kernels:
        world.machine.prepare(kernel)  # without a disk cache this compiles
    return len(kernels), *counts[1:]


def as_words(cfg, **options):
    """A soak as one argument of a command line."""
    return json.dumps([asdict(cfg), options], sort_keys=True)


def kernels_of(run):
    """All kernels of a soak, once each, always in the same order. They are recorded in a round where nothing runs."""
    sizes, options = json.loads(run)
    cfg = EPConfig(**sizes)
    world = DryWorld(cfg.n_ranks)
    with Soak(cfg, world, **options) as rounds:
        rounds.round(0)
    return list(world.machine.kernels)


if __name__ == "__main__":
    run_of, capability, part = sys.argv[1:]
    # nvshmem4py imports it, which takes longer than compiling a kernel
    sys.modules.setdefault("torch", None)
    number, of = map(int, part.split("/"))
    for one in kernels_of(run_of)[number - 1 :: of]:
        one.binary(tuple(map(int, capability.split("."))))
