"""Fuzzing: worlds of epmoe_ref.strategies through the kernels in the simulator, two rounds each, to the bit.

Any configuration, routing and data (with NaN and Inf), any schedule, grid and kind of launch; memory holds garbage
before the first round, spare rows NaN. EPMOE_FUZZ=10000 runs that many worlds in this folder's tests instead of the
sample. It shrinks a failing world to a small one, which takes minutes; use -x.
"""

from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import batches, law

import epmoe_ref
from epmoe import ExpertParallel, LaunchConfig, LocalWorld
from epmoe.check import compare_combined_world, compare_dispatched_world
from epmoe.host.arrays import to_numpy
from epmoe.host.inputs import COMBINE_DTYPE
from epmoe.routing import Routed
from epmoe.verify.checked_rounds import WEIGHTS, Case, rounds_of
from epmoe_ref import strategies
from epmoe_ref.errors import EPValueError

ROUNDS, GARBAGE = 0.68, 0.2  # shares of all worlds
GRIDS = (None, LaunchConfig(2, 32), LaunchConfig(5, 32), LaunchConfig(2, 96), LaunchConfig(4, 64))


def routed(world):
    return Routed(world.input_tokens, world.topk_ids, world.router_weights)


@st.composite
def cases(draw):
    """(case, routed batches of its rounds)."""
    first = draw(strategies.worlds())
    weights = draw(st.sampled_from(WEIGHTS[:2] if first.cfg.fused_shared_expert else WEIGHTS))
    case = Case(
        first.cfg,
        weights,
        weights != "none" and draw(st.booleans()),
        draw(st.booleans()),
        intermediate=8,
        kernels=draw(st.sampled_from(("plain", "fast"))),
    )
    return case, [routed(first), routed(draw(strategies.worlds(first.cfg)))]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", batches(ROUNDS))
def test_two_rounds_are_the_references(batch):
    @law(batch, ROUNDS)
    @given(cases(), st.sampled_from(GRIDS), strategies.seeds(), st.sampled_from((True, None, None, None)))
    def rounds_agree(given, launch, schedule, racecheck):
        case, batches = given
        world = LocalWorld(case.cfg.n_ranks, seed=schedule, racecheck=racecheck)
        with np.errstate(all="ignore"):
            for done in rounds_of(case, world, batches, launch=launch):
                assert not done.differences, f"{case}, round {done.number}: {done.differences[0]}"

    rounds_agree()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", batches(GARBAGE))
def test_garbage_ids_are_refused_and_leave_no_trace(batch):
    """In host memory they are refused. In device memory kernels treat them as -1 and report them."""

    @law(batch, GARBAGE)
    @given(strategies.worlds(garbage=True), st.data(), strategies.seeds(), st.booleans(), st.booleans())
    def refused(garbage, data, schedule, fused, on_device):
        cfg, x = garbage.cfg, garbage.input_tokens
        bad = [ids for ids in garbage.topk_ids if not are_good(ids, cfg.n_experts)]
        good = data.draw(strategies.worlds(cfg))
        world = LocalWorld(cfg.n_ranks, seed=schedule)
        with ExpertParallel(cfg, world, fused=fused) as ep:
            refusal = pytest.raises(EPValueError, match="topk_ids") if bad else nullcontext()
            if on_device:
                # as from device memory: the host does not check them or wait for reports
                unseen = patch.object(ep._engine, "check", lambda result=None: result)
                with patch("epmoe.host.inputs.check_ids"), unseen:
                    dispatched = ep.dispatch(x, garbage.topk_ids)
                with refusal:
                    ep.check()
                agree_on_all(ep, garbage, dispatched)
            elif bad:
                with refusal:
                    ep.dispatch(x, garbage.topk_ids)
            agree(
                cfg,
                ep.dispatch(good.input_tokens, good.topk_ids),
                epmoe_ref.dispatch(cfg, good.input_tokens, good.topk_ids),
            )

    refused()


def agree(cfg, dispatched, want):
    assert not compare_dispatched_world(cfg, [d.trimmed().numpy() for d in dispatched], want)


def agree_on_all(ep, garbage, dispatched):
    """Dispatch, and combine of ones with weights of one, are as with the cleaned ids."""
    cfg, ids = ep.cfg, [cleaned(ids, ep.cfg.n_experts) for ids in garbage.topk_ids]
    want = epmoe_ref.dispatch(cfg, garbage.input_tokens, ids)
    ones = [np.ones(i.shape, np.float32) for i in ids]
    agree(cfg, dispatched, want)
    y = [np.ones((len(d.output_tokens), cfg.hidden), COMBINE_DTYPE[cfg.combine_dtype]) for d in want]
    got = [to_numpy(out) for out in ep.combine(y, dispatched, ones)]
    assert not compare_combined_world(cfg, got, epmoe_ref.combine(cfg, y, want, router_weights=ones))


def cleaned(ids, n_experts):
    """As kernels clean them: -1 for an id of no expert, and for a repeated id of a token."""
    ids = np.where((ids < 0) | (ids >= n_experts), -1, ids)
    for slot in range(1, ids.shape[1]):
        ids[(ids[:, :slot] == ids[:, slot : slot + 1]).any(axis=1), slot] = -1
    return ids


def are_good(ids, n_experts):
    """Whether they are valid: experts or -1, no expert twice in a token."""
    taken = [[e for e in token if e >= 0] for token in ids.tolist()]
    return ((ids >= -1) & (ids < n_experts)).all() and all(len(set(own)) == len(own) for own in taken)
