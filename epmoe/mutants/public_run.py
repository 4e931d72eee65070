"""One run of a public world: rounds of an ExpertParallel with edited kernels, every result compared with the reference.

It covers options that other worlds leave at their defaults. The host waits after each call.
"""

from functools import lru_cache

import ml_dtypes
import numpy as np

import epmoe_ref
from epmoe.check import compare_combined_world, compare_dispatched_world
from epmoe.expert_parallel import ExpertParallel
from epmoe.host.arrays import to_numpy
from epmoe.host.inputs import COMBINE_DTYPE
from epmoe.kernels import LaunchConfig
from epmoe.layout import ABSENT
from epmoe.mutants import experts
from epmoe.mutants.errors import WrongResult
from epmoe.verify.checked_rounds import reduction
from epmoe.worlds.local import LocalWorld

SMALLEST = 2.0**-127  # of an e8m0 scale
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6)


def edges(rng, n, hidden):
    """Tokens bf16 [n, hidden] with values for which number formats differ, one token of each kind in turn."""
    group = np.arange(hidden) // 32
    sign = np.where(np.arange(hidden) % 3 == 1, -1, 1)
    strewn = np.array([np.nan, np.inf, -np.inf, -0.0, 2.0**-133, 3e38, -3e38])
    normal = rng.standard_normal((n, hidden)) * 2.0 ** rng.integers(-12, 13, (n, hidden))
    kinds = (
        np.where(rng.random((n, hidden)) < 0.1, rng.choice(strewn, (n, hidden)), normal),
        np.tile(sign * np.array((1, 6, 448, 2, 1.5, 12, 0.5, 3))[group % 8] * SMALLEST, (n, 1)),
        normal * 2.0**-14 / (1 + 2 * group),  # scales of nvfp4 that are zero, or nearly
        np.full((n, hidden), -0.0),
        np.where(sign < 0, -0.0, 0.0) + np.zeros((n, 1)),
        np.tile(np.resize(TIES, hidden) * sign, (n, 1)),
        normal,
    )
    return np.choose(np.arange(n)[:, None] % len(kinds), kinds).astype(ml_dtypes.bfloat16)


@lru_cache(None)
def rounds(world):
    """For each round: (tokens, ids, weights) as lists over ranks, and the expected results of dispatch and of combine."""
    cfg, rng, out = world.cfg, np.random.default_rng(7), []
    for tokens in world.tokens:
        x = [
            edges(rng, n, cfg.hidden) if world.edges else rng.normal(size=(n, cfg.hidden)).astype(ml_dtypes.bfloat16)
            for n in tokens
        ]
        ids = [_routing(world, n, rng) for n in tokens]
        weights = [rng.random((n, cfg.top_k)).astype(np.float32) for n in tokens]
        if cfg.skip_a2a:
            x, ids, weights = ([of_ranks[0]] * cfg.n_ranks for of_ranks in (x, ids, weights))
        scale = [0.5 + 0.375 * rank for rank in range(cfg.n_ranks)] if world.scaled else 1.0
        want = epmoe_ref.dispatch(cfg, x, ids, **dict(input_scale=scale) if world.scaled else {})
        combined = epmoe_ref.combine(cfg, [outputs(cfg, d) for d in want], want, **reduction(world, weights))
        out.append((x, ids, weights, scale, want, combined))
    return out


def _routing(world, n, rng):
    cfg = world.cfg
    if world.to_one:
        return np.full((n, cfg.top_k), cfg.n_experts - 1, np.int32)
    ids = np.array([rng.permutation(cfg.n_experts)[: cfg.top_k] for _ in range(n)], np.int32).reshape(n, cfg.top_k)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def outputs(cfg, dispatched):
    """Expert outputs [rows, hidden] in combine_dtype. For float32 they are inexact."""
    rows = experts.reference(cfg, dispatched).astype(COMBINE_DTYPE[cfg.combine_dtype], order="C")
    if cfg.combine_dtype == "fp32":
        rows *= np.float32(1.1)
    # NaNs equal to the sentinel of words that have not arrived; a row's bytes, not its place, decide whether it has one
    for row, words in zip(rows.astype(np.float32), rows.view(np.uint32)):
        if row[0] % 3 == 0:
            words[int(row[1]) % len(words)] = ABSENT
    return rows


class PublicRun:
    """One run. go() raises any error of the simulator or the check."""

    def __init__(self, world, kernels, seed, *, racecheck=True, **simulation):
        self.world, self.kernels = world, kernels
        self.local = LocalWorld(world.cfg.n_ranks, seed=seed, racecheck=racecheck, **simulation)

    def go(self):
        """Run the world's rounds with the edited kernels. Raises the error that notices the edit."""
        world = self.world
        launch = LaunchConfig(*world.shape, trace=world.trace)
        with np.errstate(all="ignore"):
            expected = rounds(world)
            with ExpertParallel(world.cfg, self.local, fused=world.fused, launch=launch, _factories=self.kernels) as ep:
                for number, round_ in enumerate(expected, 1):
                    self._round(ep, number, *round_)
                if world.trace:
                    ep.trace()

    def _round(self, ep, number, x, ids, weights, scale, want, combined):
        cfg, options = self.world.cfg, reduction(self.world, weights)
        if self.world.fused:
            dispatched = ep.dispatch(x, ids, scale)
        else:
            ep.dispatch_async(x, ids, scale)
            dispatched = ep.dispatch_wait()
        seen = [d.trimmed().numpy() for d in dispatched]
        self._agree(number, compare_dispatched_world(cfg, seen, want))
        y = []
        for d in seen:
            y.append(np.full((ep.capacity, cfg.hidden), np.nan, COMBINE_DTYPE[cfg.combine_dtype]))
            y[-1][: len(d.output_tokens)] = outputs(cfg, d)
        if self.world.fused:
            got = ep.combine(y, dispatched, **options)
        else:
            ep.combine_async(y, dispatched)
            got = ep.combine_wait(**options)
        ep.check()
        self._agree(number, compare_combined_world(cfg, [to_numpy(out) for out in got], combined))

    def _agree(self, number, differences):
        if differences:
            raise WrongResult(f"round {number}: {differences[0]}")
