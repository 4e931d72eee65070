"""Rows that need no signals, of at most four tokens a rank in the simulator: every word says that it is there."""

from dataclasses import replace

import numpy as np
import pytest
from absent_rank import TIMEOUT_S, expect_named, without
from against_reference import equal_rows
from rows_group import ABSENT, BF16, FP16, FP32, assert_same, expect_nothing_left, group_of, host, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import buffers
from epmoe.fused_a2a import rows as rows_calls
from epmoe.kernels.rows.shape import SMALL
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPStateError
from epmoe_ref.strategies import RowsWorld

FEW = SMALL.lamport_tokens


def equal_calls(group, rng, num_tokens, hidden, top_k=3, dtype=BF16, dropped=0.2, of_combine=None):
    """All calls on so many tokens give what the reference does; 2 experts a rank."""
    n_experts = 2 * len(num_tokens)
    ids, probs = routing(rng, num_tokens, n_experts, top_k, dropped)
    equal_rows(group, RowsWorld(tokens(rng, num_tokens, hidden), ids, probs, n_experts), rng, dtype, of_combine)
    expect_nothing_left(group, buffers.get_buffer(group, 0))


@pytest.mark.parametrize(
    "seed, n_sms",
    [(None, 2), pytest.param(1, 4, marks=pytest.mark.nightly), pytest.param(2, 3, marks=pytest.mark.nightly)],
)
def test_calls_of_any_width_and_of_any_way_leave_nothing_behind(seed, n_sms, tonight):
    """Rows of another width each time, so that other rows lie at the same places; calls of many in between."""
    group = group_of(3, n_sms=n_sms, num_threads=64, seed=seed, racecheck=True)
    rng = np.random.default_rng(seed)
    for num_tokens, hidden, dtype in (
        ((FEW, 1, 0), 24, BF16),
        ((1, 0, 2), 1160, FP32),
        ((0, 0, 3), 8, FP16),
        ((FEW, FEW + 4, 1), 24, BF16),
        ((1, 2, 2), 80, BF16),
        ((FEW, FEW, 3), 40, BF16),
    )[: 6 if tonight else 4]:
        equal_calls(group, rng, num_tokens, hidden, dtype=dtype, of_combine=hidden)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seed", [None, 11])
def test_the_same_with_signals(seed):
    """Flags and windows, and no memory for rows without them."""
    group = group_of(3, n_sms=4, num_threads=64, seed=seed, racecheck=True, lamport_rows=False)
    rng = np.random.default_rng(11)
    for num_tokens in ((FEW, 3, 0), (1, 0, 1)):
        ids, probs = routing(rng, num_tokens, 6, 3)
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, 264), ids, probs, 6), rng, hidden=264)
    assert not group.machine.races
    assert buffers.get_buffer(group, 0).pool_layout.lamport_bytes == 0


def test_more_ranks_than_are_added_up_at_once():
    group, rng = group_of(5, seed=3), np.random.default_rng(3)
    equal_calls(group, rng, (FEW, 0, 0, 0, 1), 8, 10, dropped=0, of_combine=8)


def test_no_rank_knows_how_many_tokens_the_others_have():
    """As with one rank a process: without room nothing is stored, all ranks grow and send again."""
    group = group_of(2, seed=4, racecheck=True)
    rng = np.random.default_rng(4)
    for num_tokens in ((2, 0), (1, FEW), (FEW + 2, 0)):
        equal_calls(group, rng, num_tokens, 8)


def test_more_tokens_than_a_warp_numbers_at_once():
    """Four a lane."""
    group, rng = group_of(2, num_threads=32), np.random.default_rng(5)
    launches = buffers.get_buffer(group, 0).launches
    launches.tuning = replace(SMALL, lamport_tokens=130)
    equal_calls(group, rng, (130, 1), 8, top_k=1, dropped=0)
    assert launches.shape(2, 16, None, send=(130,), top_k=1).lamport == 130


def words_of_all_kinds(rng, n_rows, n_words):
    """Rows of u32 words: such as say that nothing has come, and those that may stand for them."""
    rows = rng.integers(0, 2**32, (n_rows, n_words), np.uint32)
    for i, row in enumerate(rows):
        kind = i % 4
        if kind == 0:
            row[:] = ABSENT
        elif kind == 1:
            row[rng.random(n_words) < 0.3] = ABSENT
        elif kind == 2:
            row[:] = ABSENT - np.arange(n_words, dtype=np.uint32)  # and then each candidate in turn
        elif n_words:
            row[-1] = ABSENT
    return rows


def test_a_rank_of_few_tokens_has_blocks_for_what_peers_send(monkeypatch):
    """One token among peers with many was stored by five blocks: 45 us instead of 15 on 2 H200."""
    group, rng, grids = group_of(2, n_sms=8, num_threads=32), np.random.default_rng(3), {}
    prepared = group.machine.prepared

    def seen(kernel, grid, block, words, num_tokens, my_rank, **how):
        grids[kernel.name, num_tokens] = grid
        return prepared(kernel, grid, block, words, num_tokens, my_rank, **how)

    monkeypatch.setattr(group.machine, "prepared", seen)
    equal_calls(group, rng, (1, 1), 8)
    assert grids["rows_dispatch", 1] == grids["rows_resend", 1] == 5
    equal_calls(group, rng, (FEW, 1), 8)
    assert grids["rows_dispatch", 1] == grids["rows_resend", 1] == 8


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seed", [5, 6])
def test_received_rows_are_equal_to_the_bit_whatever_they_hold(seed, tonight):
    """Also where a part of a row holds all candidates but one; the reference moves bytes."""
    group, rng = group_of(2, n_sms=3, seed=seed, racecheck=True), np.random.default_rng(seed)
    for n_words in (4, 600, 1100) if tonight else (4, 600):
        num_tokens = (FEW, 0)
        ids, probs = routing(rng, num_tokens, 4, 2, 0)
        probs[0].view(np.uint32)[0] = ABSENT
        x = [words_of_all_kinds(rng, n, n_words).view(np.int32) for n in num_tokens]
        *want, known = reference.dispatch_forward(x, ids, probs, 4)
        *got, handle = fused_a2a.fused_dispatch(x, ids, probs, 4, group)
        for one, other in zip(got[0] + got[2], want[0] + want[2]):
            assert np.array_equal(host(one).view(np.uint32), other.view(np.uint32))
        again = buffers.get_buffer(group, 0)
        (sent,), _ = again.call("again", rows_calls.CachedPlan, ("x",), (x,), (None,), handle)
        for one, other in zip(sent, want[0]):
            assert np.array_equal(host(one).view(np.uint32), other.view(np.uint32))
        expect_nothing_left(group, buffers.get_buffer(group, 0))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_sums_over_rows_of_nans(dtype):
    """A word that says that nothing has come is a NaN in every type that is summed up."""
    group, rng = group_of(3, n_sms=4, seed=7, racecheck=True), np.random.default_rng(7)
    num_tokens = (FEW, 3, 0)
    ids, probs = routing(rng, num_tokens, 6, 4)
    *_, known = reference.dispatch_forward(tokens(rng, num_tokens, 8), ids, probs, 6)
    *_, handle = fused_a2a.fused_dispatch(tokens(rng, num_tokens, 8), ids, probs, 6, group)
    rows = [words_of_all_kinds(rng, n, 160).view(dtype) for n in known.num_rows]
    with np.errstate(all="ignore"):
        want = reference.combine_forward(rows, known)
    assert_same(fused_a2a.fused_combine(rows, group, handle)[0], want, "combined_x")
    expect_nothing_left(group, buffers.get_buffer(group, 0))


@pytest.mark.parametrize(
    "value, said",
    [(7, "is 7; 1 ids outside .* 0 repeated"), (None, ".*0 ids outside .* 1 repeated")],
    ids=["outside", "twice"],
)
def test_ids_that_only_the_device_sees_are_told_and_taken_for_none(value, said, monkeypatch):
    """As with ids in device memory: nothing is checked on the host."""
    group, rng = group_of(2), np.random.default_rng(9)
    ids, probs = routing(rng, (FEW, 3), 4, 3, dropped=0)
    bad, clean = [a.copy() for a in ids], [a.copy() for a in ids]
    bad[0][1, 2], clean[0][1, 2] = value or bad[0][1, 0], -1
    for k, outside in enumerate((4, -2, 2**40)):
        bad[1][k, k], clean[1][k, k] = outside, -1
    monkeypatch.setattr("epmoe.host.inputs.check_ids", lambda *given: None)
    x = tokens(rng, (FEW, 3), 8)
    with pytest.raises(ValueError, match=rf"rank 0: token_indices\[1, 2\] {said}"):
        fused_a2a.fused_dispatch(x, bad, probs, 4, group)
    equal_rows(group, RowsWorld(x, clean, probs, 4), rng)


def test_a_rank_that_does_not_come_is_named_and_nothing_of_what_others_sent_is_left(monkeypatch):
    """All ranks have come once. Rank 1 then stays away from three calls; afterwards all come again, twice."""
    group, rng = group_of(3, timeout=TIMEOUT_S, expire_waits=True), np.random.default_rng(10)
    num_tokens, buffer = (1, 2, 1), buffers.get_buffer(group, 0)
    ids, probs = routing(rng, num_tokens, 6, 6, dropped=0)
    x = tokens(rng, num_tokens, 8)
    _, handle = equal_rows(group, RowsWorld(x, ids, probs, 6), rng)
    rows, gradient_of = tokens(rng, handle.num_rows, 8), "the gradient of fused_combine"
    calls = (
        ("dispatch of rows", fused_a2a.fused_dispatch, x, ids, probs, 6, group),
        ("combine of rows", fused_a2a.fused_combine, rows, group, handle),
        ("dispatch of rows", buffer.call, gradient_of, rows_calls.CachedPlan, ("x",), (x,), (None,), handle),
    )
    with monkeypatch.context() as patch:
        without(buffer, 1, patch)
        for phase, call, *given in calls:
            expect_named(phase, call, *given)
            with pytest.raises(EPStateError, match=r"reset\(\)"):
                call(*given)
            buffer.reset()
            expect_nothing_left(group, buffer)
    for _ in range(2):
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, 8), ids, probs, 6), rng)
    expect_nothing_left(group, buffer)
