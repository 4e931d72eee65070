"""One rank of a ShmemWorld: rounds over p2p worlds of each size, each held against the reference on every rank.

Arguments: sizes of the p2p worlds (1,2), rounds; then, for larger shapes, hidden and tokens.
"""

import sys

from epmoe import EPConfig, ShmemWorld, routing
from epmoe.checked_rounds import Case, rounds_of

FORMATS = ("bf16", "fp8_blockwise", "nvfp4")


def main(sizes, rounds, hidden=128, tokens=6):
    for size in map(int, sizes.split(",")):
        world = ShmemWorld(p2p_world_size=size)
        for number, name in enumerate(FORMATS):
            for fused in (False, True):
                cfg = EPConfig(world.n_ranks, 4 * world.n_ranks, 3, int(hidden), int(tokens), p2p_world_size=size,
                               use_shmem=True, token_format=name, fused_shared_expert=number == 1)
                routed = [routing.make(cfg, [number, n]) for n in range(int(rounds))]
                for r in rounds_of(Case(cfg, fused=fused), world, routed):
                    assert not r.differences, r.differences[0]
        print(f"rank {world.rank} of {world.n_ranks}, worlds of {size}: equal\n", end="", flush=True)


main(*sys.argv[1:])
