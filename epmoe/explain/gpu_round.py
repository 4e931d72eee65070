"""A round of dispatch and combine with stamps, on whatever device there is: what `explain --trace` shows of GPUs."""

from epmoe.arrays import to_numpy
from epmoe.expert_parallel import ExpertParallel
from epmoe.explain.inputs import routed_for
from epmoe.experts import Experts
from epmoe.kernels import LaunchConfig

WARM_UP = 3         # rounds before: the first ones compile, and wait for processors to wake up


def stamped_round(cfg, world, *, fused, seed, timeout=30.0):
    """Run a few rounds and return the stamps of the last one, of all ranks; collective.

    Experts compute once, for their rows stay the same: where a row lies inside its segment may change, its number not.
    """
    routed, experts = routed_for(cfg, seed), Experts(cfg, seed)
    of_all = (routed.x, routed.topk_ids, routed.topk_weights)
    x, ids, weights = of_all if world.lists else (a[world.rank] for a in of_all)
    with ExpertParallel(cfg, world, launch=LaunchConfig(trace=True), fused=fused, timeout=timeout) as ep:
        y = None
        for _ in range(WARM_UP + 1):
            d = ep.dispatch(x, ids)
            if y is None:
                held = d if world.lists else [d]
                y = [experts(rank, one.trimmed().numpy()) for rank, one in zip(world.ranks, held)]
                y = y if world.lists else y[0]
            out = ep.combine(y, d, weights)
        for one in out if world.lists else [out]:
            to_numpy(one)
        own = ep.trace()
    return [s for of_process in world.tell(own, timeout) for s in of_process]
