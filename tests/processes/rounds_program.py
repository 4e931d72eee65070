"""One rank of a world of processes: rounds on the same buffers, each compared with the reference.

Arguments: fused or split, with "-plain" or "-fast" for kernels other than the machine's own; number of rounds.
"""

import sys

from rank_arrays import Batch, config, doubled

from epmoe import ExpertParallel, MPIWorld
from epmoe.check import compare_combined, compare_dispatched
from epmoe.host.arrays import to_numpy


def main(kind, rounds):
    world, (kind, _, kernels) = MPIWorld(), kind.partition("-")
    cfg, rank = config(world.n_ranks), world.rank
    for _ in range(2):  # the second time in memory that the first has freed
        with ExpertParallel(cfg, world, fused=kind == "fused", kernels=kernels or None) as ep:
            for number in range(rounds):
                batch = Batch(cfg, number)
                want, out_want = batch.expected()
                d = ep.dispatch(batch.x[rank], batch.ids[rank])
                exact = d.trimmed().numpy()
                assert not (found := compare_dispatched(cfg, rank, exact, want[rank])), found[0]
                out = to_numpy(ep.combine(doubled(exact.output_tokens), d, batch.weights[rank]))
                assert not (found := compare_combined(cfg, rank, out, out_want[rank])), found[0]
    print(f"rank {rank} of {world.n_ranks} equal\n", end="", flush=True)


main(sys.argv[1], int(sys.argv[2]))
