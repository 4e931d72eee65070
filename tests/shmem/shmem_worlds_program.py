"""One rank of a ShmemWorld: rounds over p2p worlds of each size, each compared with the reference on every rank.

Arguments: sizes of the p2p worlds (1,2), rounds; then, for larger shapes, hidden and tokens. On GPUs the kernels are
compiled first, in other processes with the arguments compile, I/N, compute capability, ranks, sizes, hidden,
tokens.
"""

import sys

from epmoe import EPConfig, ShmemWorld, device, routing
from epmoe.host import compiling
from epmoe.verify import compiled_first
from epmoe.verify.checked_rounds import Case, rounds_of

FORMATS = ("bf16", "fp8_blockwise", "nvfp4")


def cases(n_ranks, size, hidden, tokens):
    """[(seed, case)] over p2p worlds of this size."""
    for number, name in enumerate(FORMATS):
        for fused in (False, True):
            cfg = EPConfig(
                n_ranks,
                4 * n_ranks,
                3,
                int(hidden),
                int(tokens),
                p2p_world_size=size,
                use_shmem=True,
                token_format=name,
                fused_shared_expert=number == 1,
            )
            yield number, Case(cfg, fused=fused)


def cases_of(n_ranks, sizes, hidden, tokens):
    return [case for size in map(int, sizes.split(",")) for _, case in cases(n_ranks, size, hidden, tokens)]


def compile_part(cc, n_ranks, *shape_and_part):
    *shape, part = shape_and_part
    # which nvshmem4py imports, and which takes longer than a kernel
    sys.modules.setdefault("torch", None)
    number, of = map(int, part.split("/"))
    compiled_first.compile_part(cases_of(int(n_ranks), *shape), number, of, tuple(map(int, cc.split("."))))


def compile_ahead(world, *shape):
    chosen = cases_of(world.n_ranks, *shape)
    words = ["compile", "%d.%d" % world.machine.compute_capability, str(world.n_ranks), *shape]
    compiling.ahead(world, chosen, lambda: compiled_first.all_kernels(chosen), [sys.executable, __file__, *words])


def main(sizes, rounds, hidden="128", tokens="6"):
    world = None
    for size in map(int, sizes.split(",")):
        first, world = world is None, ShmemWorld(p2p_world_size=size)
        if first and not device.SIM:
            compile_ahead(world, sizes, hidden, tokens)
        for seed, case in cases(world.n_ranks, size, hidden, tokens):
            routed = [routing.make(case.cfg, [seed, n]) for n in range(int(rounds))]
            for r in rounds_of(case, world, routed):
                assert not r.differences, r.differences[0]
        print(f"rank {world.rank} of {world.n_ranks}, worlds of {size}: equal\n", end="", flush=True)


if sys.argv[1] == "compile":
    compile_part(*sys.argv[2:])
else:
    main(*sys.argv[1:])
