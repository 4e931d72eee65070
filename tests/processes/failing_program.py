"""One rank of a world in which the last rank fails.

Arguments: how (return, raise, kill), phase (start, dispatch, combine, leave), timeout [s]; ranks of a p2p world, with
SHMEM between the worlds (default: an MPIWorld).
"""

import os
import signal
import sys
import time

from rank_arrays import Batch, doubled, world_of

from epmoe import ExpertParallel, PeerTimeout


def fail(how):
    if how == "return":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("raised on purpose")


def main(how, phase, timeout, p2p_world_size=0):
    world, cfg = world_of(int(p2p_world_size))
    rank = world.rank
    batch, fails = Batch(cfg, 0), world.rank == world.n_ranks - 1

    def reach(here):
        if fails and here == phase:
            print(f"rank {rank} fails\n", end="", flush=True)
            fail(how)
        return time.monotonic()

    def round_of(ep):
        d = ep.dispatch(batch.x[rank], batch.ids[rank])
        y = doubled(d.trimmed().numpy().output_tokens)
        reach("combine")
        ep.combine(y, d, batch.weights[rank])
        ep.check()

    begin = time.monotonic()
    try:
        reach("start")
        with ExpertParallel(cfg, world, timeout=timeout if phase == "start" else 60, kernels="fast") as ep:
            phase, later = "", phase
            round_of(ep)  # everything is compiled before the time counts
        phase = later
        with ExpertParallel(cfg, world, timeout=timeout, kernels="fast") as ep:
            begin = reach("dispatch")
            round_of(ep)
            begin = reach("leave")
    except PeerTimeout as error:
        print(f"rank {rank} waited {time.monotonic() - begin:.2f}: {error}\n", end="", flush=True)
        raise


main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
