"""Rounds checked against the reference: dispatch, experts, combine, every byte of both results compared."""

import time
from dataclasses import dataclass, field

import epmoe_ref
import numpy as np
from epmoe_ref.config import EPConfig

from epmoe import fma_rn, mul_rn, routing
from epmoe.arrays import to_numpy
from epmoe.check import compare_combined_world, compare_dispatched_world
from epmoe.experts import Experts, reordered
from epmoe.expert_parallel import ExpertParallel

WEIGHTS = ("array", "function", "none")


def scaled_weight(token, k, table, factor):
    """Router weights as a function: a table's entry times a factor, rounded once."""
    return mul_rn(table[token, k], factor)


def scale_and_shift(token, col, value, bias, factor):
    """An epilogue: value * factor + bias[col], rounded once, then rounded to the output type."""
    return fma_rn(value, factor, bias[col])


@dataclass(frozen=True)
class Case:
    """What is verified: a configuration, and how its options are used.

    weights: router weights as "array", as "function", or "none" (unreduced output). epilogue: with the function above.
    fused: fused kernels. rounds: how many follow each other on the same buffers, without a host reset.
    """

    cfg: EPConfig
    weights: str = "array"
    epilogue: bool = False
    fused: bool = False
    rounds: int = 3
    intermediate: int = 32

    def __str__(self):
        c = self.cfg
        parts = [c.token_format + (" slots" if c.fuse_a_scale_preshuffle else ""), "fused" if self.fused else "split",
                 "skip_a2a" if c.skip_a2a else "a2a"]
        parts += ["shared expert"] if c.fused_shared_expert else []
        parts += [{"array": "weights", "function": "weights function", "none": "unreduced"}[self.weights]]
        parts += ["epilogue"] if self.epilogue else []
        return ", ".join(parts)


@dataclass
class Round:
    """What one round did: inputs, results, the counters of one rank at several moments, and the differences."""

    number: int
    routed: routing.Routed
    seen: list = field(default_factory=list)            # rank -> the kernels' Dispatched, NumPy, exact rows
    combined: list = field(default_factory=list)
    moments: dict = field(default_factory=dict)         # moment -> {region: array} of `shown_rank`
    dispatch_differences: list = field(default_factory=list)
    combine_differences: list = field(default_factory=list)
    kernel_seconds: float = 0.0
    reference_seconds: float = 0.0

    @property
    def differences(self):
        """All of them; none if the round is right."""
        return self.dispatch_differences + self.combine_differences


def rounds_of(case, world, routed_rounds, *, seed=0, shown_rank=0, regions=(), timeout=30.0, launch=None, kernels=None):
    """Yield a finished Round for each of the routed batches; stops after the first one with a difference."""
    with ExpertParallel(case.cfg, world, fused=case.fused, timeout=timeout, launch=launch, kernels=kernels) as ep:
        for number, routed in enumerate(routed_rounds, 1):
            yield (done := _round(case, ep, Round(number, routed), seed, shown_rank, regions))
            if done.differences:
                return


def _round(case, ep, r, seed, shown_rank, regions):
    cfg, routed = case.cfg, r.routed

    def look(moment):
        r.moments[moment] = {name: ep.region(name, shown_rank) for name in regions}

    with _Clock(r, "reference_seconds"):
        want = epmoe_ref.dispatch(cfg, routed.x, routed.topk_ids)
    look("before")
    with _Clock(r, "kernel_seconds"):
        if case.fused:
            dispatched = ep.dispatch(routed.x, routed.topk_ids)
        else:
            ep.dispatch_async(routed.x, routed.topk_ids)
            look("sent")
            dispatched = ep.dispatch_wait()
        r.seen = [d.trimmed().numpy() for d in dispatched]
    look("dispatched")
    r.dispatch_differences = compare_dispatched_world(cfg, r.seen, want)
    if r.dispatch_differences:
        return r
    experts = Experts(cfg, seed, case.intermediate)
    with _Clock(r, "reference_seconds"):
        y_want = [experts(rank, d) for rank, d in enumerate(want)]
    # The same numbers in the kernels' row order; spare rows hold NaN, which must not reach any result.
    y = [reordered(cfg, w, d, yw, rows=ep.capacity) for w, d, yw in zip(want, r.seen, y_want)]
    options = _reduction(case, routed)
    with _Clock(r, "reference_seconds"):
        expected = epmoe_ref.combine(cfg, y_want, want, **options)
    with _Clock(r, "kernel_seconds"):
        if case.fused:
            combined = ep.combine(y, dispatched, **options)
        else:
            ep.combine_async(y, dispatched)
            look("returned")
            combined = ep.combine_wait(**options)
        ep.check()
        r.combined = [to_numpy(out) for out in combined]
    look("combined")
    r.combine_differences = compare_combined_world(cfg, r.combined, expected, topk_ids=[d.topk_ids for d in r.seen])
    return r


def _reduction(case, routed):
    """router_weights, epilogue and their arguments, as combine takes them in the reference and in epmoe."""
    options = {}
    if case.weights == "array":
        options = dict(router_weights=routed.topk_weights)
    elif case.weights == "function":
        options = dict(router_weights=scaled_weight, router_weights_args=(routed.topk_weights, 0.75))
    if case.epilogue:
        bias = np.linspace(-1, 1, case.cfg.hidden, dtype=np.float32)
        options |= dict(epilogue=scale_and_shift, epilogue_args=(bias, 1.25))
    return options


class _Clock:
    """Adds the seconds of a block to an attribute."""

    def __init__(self, target, name):
        self.target, self.name = target, name

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *_):
        setattr(self.target, self.name, getattr(self.target, self.name) + time.perf_counter() - self.start)
