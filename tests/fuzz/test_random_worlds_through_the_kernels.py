"""Fuzzing: worlds of epmoe_ref.strategies through the kernels in the simulator, two rounds each, to the bit.

Any configuration, routing and data (NaN and Inf among it), any schedule, grid and kind of launch; memory holds garbage
before the first round, spare rows NaN. EPMOE_FUZZ=10000 runs that many worlds of this folder's tests instead of the
sample, a nightly run, and shrinks what fails to a small world, which takes minutes: give -x.
"""

import epmoe_ref
import numpy as np
import pytest
from epmoe import ExpertParallel, LaunchConfig, LocalWorld
from epmoe.check import compare_dispatched_world
from epmoe.routing import Routed
from epmoe.verify.checked_rounds import WEIGHTS, Case, rounds_of
from epmoe_ref import strategies
from epmoe_ref.errors import EPValueError
from hypothesis import given
from hypothesis import strategies as st
from nightly import BATCHES, law

GRIDS = (None, LaunchConfig(2, 32), LaunchConfig(5, 32), LaunchConfig(2, 96), LaunchConfig(4, 64))


def routed(world):
    return Routed(world.input_tokens, world.topk_ids, world.router_weights)


@st.composite
def cases(draw):
    """(case, routed batches of its rounds)."""
    first = draw(strategies.worlds())
    weights = draw(st.sampled_from(WEIGHTS[:2] if first.cfg.fused_shared_expert else WEIGHTS))
    case = Case(first.cfg, weights, weights != "none" and draw(st.booleans()), draw(st.booleans()), intermediate=8)
    return case, [routed(first), routed(draw(strategies.worlds(first.cfg)))]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_two_rounds_are_the_references(batch):
    @law(batch, 0.68)
    @given(cases(), st.sampled_from(GRIDS), strategies.seeds(), st.sampled_from((True, None, None, None)))
    def rounds_agree(given, launch, schedule, racecheck):
        case, batches = given
        world = LocalWorld(case.cfg.n_ranks, seed=schedule, racecheck=racecheck)
        with np.errstate(all="ignore"):
            for done in rounds_of(case, world, batches, launch=launch):
                assert not done.differences, f"{case}, round {done.number}: {done.differences[0]}"
    rounds_agree()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_garbage_ids_are_refused_and_leave_no_trace(batch):
    @law(batch, 0.2)
    @given(strategies.worlds(garbage=True), st.data(), strategies.seeds(), st.booleans())
    def refused(garbage, data, schedule, fused):
        cfg = garbage.cfg
        bad = [ids for ids in garbage.topk_ids if not are_good(ids, cfg.n_experts)]
        good = data.draw(strategies.worlds(cfg))
        world = LocalWorld(cfg.n_ranks, seed=schedule)
        with ExpertParallel(cfg, world, fused=fused) as ep:
            if bad:
                with pytest.raises(EPValueError, match="topk_ids"):
                    ep.dispatch(garbage.input_tokens, garbage.topk_ids)
            dispatched = ep.dispatch(good.input_tokens, good.topk_ids)
            got = [d.trimmed().numpy() for d in dispatched]
        assert not compare_dispatched_world(cfg, got, epmoe_ref.dispatch(cfg, good.input_tokens, good.topk_ids))
    refused()


def are_good(ids, n_experts):
    """Whether kernels may be given them: experts or -1, no expert twice in a token."""
    taken = [[e for e in token if e >= 0] for token in ids.tolist()]
    return ((ids >= -1) & (ids < n_experts)).all() and all(len(set(own)) == len(own) for own in taken)
