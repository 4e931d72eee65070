"""Every kind of call under the race detector, with schedules at random: nothing is ordered by luck, nobody hangs."""

import numpy as np
import pytest
from absent_rank import TIMEOUT_S, absent_rank, expect_named
from against_reference import equal_hybrid, equal_rows
from rows_group import group_of, routing, tokens

from epmoe import fused_a2a
from epmoe_ref.errors import EPStateError
from epmoe_ref.strategies import HybridWorld, RowsWorld


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_are_free_of_races_over_several_rounds(seed):
    group, rng = group_of(3, num_threads=64, seed=seed, racecheck=True), np.random.default_rng(seed)
    for num_tokens in ((5, 0, 4), (2, 7, 1)):
        ids, probs = routing(rng, num_tokens, 6, 3)
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, 8), ids, probs, 6), rng)
    assert not group.machine.races


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seed, budget, fp8", [(4, 9, True), (3, None, False)])
def test_rows_by_expert_are_free_of_races_over_several_rounds(seed, budget, fp8):
    group, rng = group_of(3, num_threads=64, seed=seed, racecheck=True), np.random.default_rng(seed)
    for num_tokens in ((5, 0, 4), (2, 3, 1)):
        maps = [rng.random((n, 6)) < 0.5 for n in num_tokens]
        probs = [rng.random(m.shape, np.float32) for m in maps]
        hidden = 128 if fp8 else 8
        world = HybridWorld(tokens(rng, num_tokens, hidden), maps, probs, 2, budget, 4, fp8, None)
        equal_hybrid(group, world, rng)
    assert not group.machine.races


def test_a_rank_that_does_not_come_is_named_and_reset_helps(monkeypatch):
    group, rng = group_of(3, timeout=TIMEOUT_S, expire_waits=True), np.random.default_rng(5)
    ids, probs = routing(rng, (3, 2, 4), 6, 2)
    world = RowsWorld(tokens(rng, (3, 2, 4), 8), ids, probs, 6)
    _, handle = equal_rows(group, world, rng)
    with monkeypatch.context() as patch:
        absent_rank(group, 1, patch)
        expect_named("dispatch of rows", fused_a2a.fused_dispatch, world.x, ids, probs, 6, group)
        with pytest.raises(EPStateError, match=r"call reset\(\)"):
            fused_a2a.fused_combine(tokens(rng, handle.num_rows, 8), group, handle)
        buffer = fused_a2a.get_buffer(group, 0)
        buffer.reset()
        expect_named(
            "combine of rows",
            fused_a2a.fused_combine,
            tokens(rng, handle.num_rows, 8),
            group,
            handle,
        )
        buffer.reset()
    equal_rows(group, world, rng)


def test_ids_that_only_the_device_sees_are_treated_as_none_and_told(monkeypatch):
    """As with ids in device memory: nothing is checked on the host."""
    group, rng = group_of(2), np.random.default_rng(6)
    ids, probs = routing(rng, (4, 3), 4, 3, dropped=0)
    bad, clean = [a.copy() for a in ids], [a.copy() for a in ids]
    for value, slot in ((4, 0), (-2, 1), (2**40, 2)):
        bad[1][slot, slot], clean[1][slot, slot] = value, -1
    bad[0][1, 2], clean[0][1, 2] = bad[0][1, 0], -1
    monkeypatch.setattr("epmoe.host.inputs.check_ids", lambda *given: None)
    x = tokens(rng, (4, 3), 8)
    with pytest.raises(
        ValueError, match=r"rank 0: token_indices\[1, 2\] .*0 ids outside .* 1 repeated"
    ):
        fused_a2a.fused_dispatch(x, bad, probs, 4, group)
    equal_rows(group, RowsWorld(x, clean, probs, 4), rng)
