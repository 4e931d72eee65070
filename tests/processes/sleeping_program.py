"""One rank of a world whose last rank is late, in each phase in turn; after each, all reset and a round succeeds.

Arguments: timeout [s], phases (dispatch,combine); ranks of a p2p world, with SHMEM between the worlds (default: an
MPIWorld).
"""

import sys
import time

import numpy as np
from rank_arrays import Batch, doubled, world_of

from epmoe import EPStateError, ExpertParallel, PeerTimeout
from epmoe.host.arrays import to_numpy


def main(timeout, phases, p2p_world_size=0):
    world, cfg = world_of(int(p2p_world_size))
    rank = world.rank
    batch, sleeps = Batch(cfg, 0), world.rank == world.n_ranks - 1
    out_want = batch.expected()[1][rank]
    # all is compiled before the time counts
    with ExpertParallel(cfg, world, timeout=60, kernels="fast") as ep:
        split_or_fused_round(ep, batch, rank, "", fused=False, nap=0)
        good_round(ep, batch, rank, out_want)
    with ExpertParallel(cfg, world, timeout=timeout, kernels="fast") as ep:
        for phase in phases.split(","):
            begin = time.monotonic()
            try:
                sleep_before, fused = phase if sleeps else "", phase in ("dispatch", "combine")
                split_or_fused_round(ep, batch, rank, sleep_before, fused, nap=1.4 * timeout)
                print(f"rank {rank} finished, sleeping before {phase}\n", end="", flush=True)
            except PeerTimeout as error:
                waited = time.monotonic() - begin
                print(f"rank {rank} waited {waited:.2f}, sleeping before {phase}: {error}\n", end="", flush=True)
                refused(ep, batch, rank)
            ep.reset()
            good_round(ep, batch, rank, out_want)
    print(f"rank {rank} recovered every time\n", end="", flush=True)


def split_or_fused_round(ep, batch, rank, sleep_before, fused, nap):
    """A round by the split or the fused kernels; this rank sleeps before the call of that name."""

    def call(name, *arguments):
        if name == sleep_before:
            time.sleep(nap)
        result = getattr(ep, name)(*arguments)
        ep.check()
        return result

    x, ids, weights = batch.x[rank], batch.ids[rank], batch.weights[rank]
    if fused:
        d = call("dispatch", x, ids)
        call("combine", doubled(d.trimmed().numpy().output_tokens), d, weights)
    else:
        call("dispatch_async", x, ids)
        d = call("dispatch_wait")
        call("combine_async", doubled(d.trimmed().numpy().output_tokens), d)
        call("combine_wait", weights)


def refused(ep, batch, rank):
    try:
        ep.dispatch(batch.x[rank], batch.ids[rank])
    except EPStateError:
        return
    raise AssertionError("a dispatch after a timeout was not refused")


def good_round(ep, batch, rank, out_want):
    d = ep.dispatch(batch.x[rank], batch.ids[rank])
    out = ep.combine(doubled(d.trimmed().numpy().output_tokens), d, batch.weights[rank])
    ep.check()
    assert np.array_equal(to_numpy(out), out_want)


main(float(sys.argv[1]), *sys.argv[2:])
