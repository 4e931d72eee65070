"""Rounds of dispatch, experts and combine. Every byte of both results is compared with the reference."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

import epmoe_ref
from epmoe import device, fma_rn, mul_rn, routing
from epmoe.check import compare_combined, compare_dispatched
from epmoe.check.difference import of_all_ranks
from epmoe.expert_parallel import ExpertParallel
from epmoe.host.arrays import to_numpy
from epmoe.verify.experts import Experts, reordered
from epmoe_ref.config import EPConfig

WEIGHTS = ("array", "function", "none")


def scaled_weight(token, k, table, factor):
    """Router weights as a function: a table's entry times a factor, rounded once."""
    return mul_rn(table[token, k], factor)


def scale_and_shift(token, col, value, bias, factor):
    """An epilogue: value * factor + bias[col], rounded once, then rounded to the output type."""
    return fma_rn(value, factor, bias[col])


@dataclass(frozen=True)
class Case:
    """One verification: a configuration, and how its options are used.

    weights: router weights as "array", as "function", or "none" (unreduced output). epilogue: with the function above.
    fused: fused kernels. kernels: "plain", "fast", or None for the machine's default. rounds: number of rounds on the
    same buffers, without a reset by the host.
    """

    cfg: EPConfig
    weights: str = "array"
    epilogue: bool = False
    fused: bool = False
    rounds: int = 3
    intermediate: int = 32
    kernels: str | None = None

    def __str__(self):
        c = self.cfg
        parts = [
            f"{c.token_format}{' slots' if c.fuse_a_scale_preshuffle else ''} tokens",
            f"{f'{self.kernels} ' if self.kernels else ''}kernels ({'fused' if self.fused else 'async + wait'})",
        ]
        parts += ["skip_a2a"] if c.skip_a2a else []
        parts += [f"p2p worlds of {c.p2p_world_size}"] if c.use_shmem else []
        parts += ["shared expert"] if c.fused_shared_expert else []
        parts += [{"array": "router weights", "function": "weights from a function", "none": "unreduced"}[self.weights]]
        parts += ["epilogue"] if self.epilogue else []
        return ", ".join(parts)


@dataclass
class Round:
    """One round: its inputs, results, the counters of one rank at several moments, and the differences."""

    number: int
    routed: routing.Routed
    seen: list = field(default_factory=list)  # rank -> the kernels' Dispatched, NumPy, exact rows
    # rank -> its experts' outputs, in the order of seen's rows
    expert_outputs: dict = field(default_factory=dict)
    combined: list = field(default_factory=list)
    moments: dict = field(default_factory=dict)  # moment -> {region: array} of `shown_rank`
    dispatch_differences: list = field(default_factory=list)
    combine_differences: list = field(default_factory=list)
    kernel_seconds: float = 0.0
    reference_seconds: float = 0.0

    @property
    def differences(self):
        """All differences; none if the round is right."""
        return self.dispatch_differences + self.combine_differences


def rounds_of(case, world, routed_rounds, *, seed=0, shown_rank=0, regions=(), timeout=30.0, **options):
    """Yield a finished Round for each of the routed batches. Stops after the first one with a difference.

    Every process has the inputs of all ranks and computes the whole reference. It compares its own ranks' results.
    options: of ExpertParallel.
    Under the race detector the kernels of a phase run together, because a host that reads in between would order them.
    """
    with ExpertParallel(case.cfg, world, fused=case.fused, timeout=timeout, kernels=case.kernels, **options) as ep:
        for number, routed in enumerate(routed_rounds, 1):
            yield (done := _round(case, ep, Round(number, routed), seed, shown_rank, regions))
            if done.differences:
                return


def races_are_looked_for(world):
    """Whether the world's kernels run under the race detector."""
    return device.SIM and bool(world.machine.racecheck)


def _round(case, ep, r, seed, shown_rank, regions):
    cfg, routed, world = case.cfg, r.routed, ep.world
    own, halves = Own(world), not case.fused and not races_are_looked_for(world)

    def look(moment):
        r.moments[moment] = {name: ep.region(name, shown_rank) for name in regions}

    with _timed(r, "reference_seconds"):
        want = epmoe_ref.dispatch(cfg, routed.x, routed.topk_ids)
    look("before")
    with _timed(r, "kernel_seconds"):
        if halves:
            ep.dispatch_async(own(routed.x), own(routed.topk_ids))
            look("sent")
            dispatched = ep.dispatch_wait()
        else:
            dispatched = ep.dispatch(own(routed.x), own(routed.topk_ids))
        r.seen = {rank: d.trimmed().numpy() for rank, d in own.by_rank(dispatched).items()}
    look("dispatched")
    r.dispatch_differences = own.of_all(
        [d for rank in world.ranks for d in compare_dispatched(cfg, rank, r.seen[rank], want[rank])], ep.timeout
    )
    if r.dispatch_differences:
        return r
    experts = Experts(cfg, seed, case.intermediate)
    with _timed(r, "reference_seconds"):
        y_want = [experts(rank, d) for rank, d in enumerate(want)]
    # The same numbers in the kernels' row order. Spare rows hold NaN, which must not reach any result.
    y = {rank: reordered(cfg, want[rank], d, y_want[rank], rows=ep.capacity) for rank, d in r.seen.items()}
    r.expert_outputs = y
    with _timed(r, "reference_seconds"):
        expected = epmoe_ref.combine(cfg, y_want, want, **reduction(case, routed.topk_weights))
    options = reduction(case, own(routed.topk_weights))
    with _timed(r, "kernel_seconds"):
        if halves:
            ep.combine_async(own(y), dispatched)
            look("returned")
            combined = ep.combine_wait(**options)
        else:
            combined = ep.combine(own(y), dispatched, **options)
        ep.check()
        r.combined = {rank: to_numpy(out) for rank, out in own.by_rank(combined).items()}
    look("combined")

    def compare(rank):
        return compare_combined(cfg, rank, r.combined[rank], expected[rank], topk_ids=r.seen[rank].topk_ids)

    r.combine_differences = own.of_all([d for rank in world.ranks for d in compare(rank)], ep.timeout)
    return r


class Own:
    """The arguments and results of this process's ranks, in the form that their ExpertParallel uses."""

    def __init__(self, world):
        self.world = world

    def __call__(self, of_all):
        """This process's part of all ranks' arguments: a list over its ranks, or the one rank's argument."""
        mine = [of_all[rank] for rank in self.world.ranks]
        return mine if self.world.lists else mine[0]

    def by_rank(self, results):
        """Results as {rank: result}."""
        return dict(zip(self.world.ranks, results if self.world.lists else [results]))

    def of_all(self, differences, timeout):
        """The differences that all ranks found, so that either all of them go on, or none."""
        return of_all_ranks(differences, lambda value: self.world.tell(value, timeout))


def reduction(case, weights):
    """router_weights, epilogue and their arguments for combine. weights: of all ranks, or of this process's."""
    options = {}
    if case.weights == "array":
        options = dict(router_weights=weights)
    elif case.weights == "function":
        options = dict(router_weights=scaled_weight, router_weights_args=(weights, 0.75))
    if case.epilogue:
        bias = np.linspace(-1, 1, case.cfg.hidden, dtype=np.float32)
        options |= dict(epilogue=scale_and_shift, epilogue_args=(bias, 1.25))
    return options


@contextmanager
def _timed(target, name):
    """Context that adds its seconds to an attribute."""
    start = time.perf_counter()
    yield
    setattr(target, name, getattr(target, name) + time.perf_counter() - start)
