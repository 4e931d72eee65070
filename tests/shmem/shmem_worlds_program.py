"""One rank of a ShmemWorld: rounds over p2p worlds of each size, each held against the reference on every rank.

Arguments: sizes of the p2p worlds (1,2), rounds; then, for larger shapes, hidden and tokens.
"""

import sys

from epmoe import EPConfig, ShmemWorld, device, routing, verify_kernels
from epmoe.checked_rounds import Case, rounds_of

FORMATS = ("bf16", "fp8_blockwise", "nvfp4")
COMPILING = 240     # seconds


def cases(n_ranks, size, hidden, tokens):
    for number, name in enumerate(FORMATS):
        for fused in (False, True):
            cfg = EPConfig(n_ranks, 4 * n_ranks, 3, hidden, tokens, p2p_world_size=size, use_shmem=True,
                           token_format=name, fused_shared_expert=number == 1)
            yield number, Case(cfg, fused=fused)


def main(sizes, rounds, hidden=128, tokens=6):
    for size in map(int, sizes.split(",")):
        world = ShmemWorld(p2p_world_size=size)
        numbered = list(cases(world.n_ranks, size, int(hidden), int(tokens)))
        if not device.SIM:      # each rank a part, rather than all waiting for one
            verify_kernels.compile_part([case for _, case in numbered], world.rank + 1, world.n_ranks,
                                        world.machine.n_sms)
            world.tell(None, COMPILING)
        for number, case in numbered:
            routed = [routing.make(case.cfg, [number, n]) for n in range(int(rounds))]
            for r in rounds_of(case, world, routed):
                assert not r.differences, r.differences[0]
        print(f"rank {world.rank} of {world.n_ranks}, worlds of {size}: equal\n", end="", flush=True)


main(*sys.argv[1:])
