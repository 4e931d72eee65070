"""Runs rounds of dispatch and combine with stamps, on any device, for `explain --trace` on GPUs."""

import time

from epmoe.expert_parallel import ExpertParallel
from epmoe.explain.inputs import routed_for
from epmoe.host.arrays import to_numpy
from epmoe.kernels import LaunchConfig
from epmoe.kernels.stamps import Stamps
from epmoe.verify.experts import Experts

WARM_UP = 3  # rounds that are not counted: they compile, and wake the processors
LATE_S = 0.002  # delay of one rank in each of the rounds that compare clocks
MEETING_S = 0.002  # before each round, until all ranks know when it begins


def stamped_rounds(cfg, world, *, fused, seed, timeout=30.0):
    """Run some rounds; returns for each round after the warm-up the [Stamps] of all ranks; collective.

    In the last round all ranks begin together. In the rounds before it each rank is late in turn. Experts compute only
    once: a row may move inside its segment, but the number of rows stays the same.
    """
    routed, experts = routed_for(cfg, seed), Experts(cfg, seed)
    of_all = (routed.x, routed.topk_ids, routed.topk_weights)
    x, ids, weights = of_all if world.lists else (a[world.rank] for a in of_all)
    with ExpertParallel(
        cfg, world, launch=LaunchConfig(trace=True), fused=fused, kernels="fast", timeout=timeout
    ) as ep:
        y, rounds = None, []
        late = [None] * WARM_UP + ([] if world.lists else [*range(world.n_ranks)] * 2) + [None]
        for number, late_rank in enumerate(late):
            # processes of one host share a clock; on several hosts no rank waits long
            begin = min(max(world.tell(time.monotonic(), timeout)), time.monotonic()) + MEETING_S
            while time.monotonic() < begin:
                pass
            if late_rank in world.ranks:
                time.sleep(LATE_S)
            d = ep.dispatch(x, ids)
            if y is None:
                held = d if world.lists else [d]
                y = [experts(rank, one.trimmed().numpy()) for rank, one in zip(world.ranks, held)]
                y = y if world.lists else y[0]
            out = ep.combine(y, d, weights)
            for one in out if world.lists else [out]:
                to_numpy(one)
            if number >= WARM_UP:
                told = world.tell([tuple(s) for s in ep.trace()], timeout)
                rounds.append([Stamps(*s) for of_process in told for s in of_process])
    return rounds
