"""Rows of few tokens, whose words say themselves of which call they are: at most two a rank in the simulator."""

import ml_dtypes
import numpy as np
import pytest
from absent_rank import rows_without_rank_1
from against_reference import equal_rows, expect_bad_ids_told
from rows_group import BF16, FP16, FP32, group_of, routing, tokens

from epmoe.kernels.rows.control import TAGGED_ROWS
from epmoe_ref.strategies import RowsWorld

FEW = TAGGED_ROWS


@pytest.mark.parametrize("seed", [None, 1])
def test_calls_of_any_width_leave_nothing_behind(seed):
    """Rows of another width each time, and so other words at the same places; calls with many tokens between them."""
    group, rng = group_of(3, num_threads=64, seed=seed, racecheck=True), np.random.default_rng(seed)
    for num_tokens, hidden, dtype in (((FEW, 1, 0), 24, BF16), ((1, FEW, FEW), 600, FP32), ((0, 0, 1), 8, FP16),
                                      ((FEW, FEW + 4, 1), 24, BF16), ((FEW, FEW, FEW), 40, BF16)):
        ids, probs = routing(rng, num_tokens, 6, 3)
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, hidden), ids, probs, 6), rng, dtype)
    assert not group.machine.races


def test_more_ranks_than_are_added_up_at_once():
    group, rng = group_of(6, seed=3, racecheck=True), np.random.default_rng(3)
    ids, probs = routing(rng, [FEW] * 6, 12, 12, dropped=0)
    equal_rows(group, RowsWorld(tokens(rng, [FEW] * 6, 16), ids, probs, 12), rng)
    assert not group.machine.races


def test_no_rank_knows_how_many_tokens_the_others_have():
    """As with one rank a process: without room nothing is stored, all ranks grow and send again."""
    group, rng = group_of(2, knows_all_ranks=False, seed=4, racecheck=True), np.random.default_rng(4)
    for num_tokens in ((1, 0), (FEW, FEW), (FEW + 5, 1)):
        ids, probs = routing(rng, num_tokens, 4, 2)
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, 8), ids, probs, 4), rng)
    assert not group.machine.races


def test_scales_go_with_rows():
    rng = np.random.default_rng(5)
    ids, probs = routing(rng, (FEW, 1), 4, 2)
    x = [(rng.integers(0, 127, (n, 4480), np.uint8).view(ml_dtypes.float8_e4m3fn),
          rng.random((n, 35), np.float32)) for n in (FEW, 1)]
    equal_rows(group_of(2), RowsWorld(x, ids, probs, 4), rng)


def test_bad_ids_are_told(monkeypatch):
    expect_bad_ids_told(monkeypatch, np.random.default_rng(6), FEW)


def test_a_rank_that_does_not_come_is_named_and_its_words_come_too_late_for_nobody(monkeypatch):
    """After reset() the numbers of calls begin again; words of the calls before it must not be taken for new ones."""
    with rows_without_rank_1(monkeypatch, 7, (1, FEW, 1)) as calls:
        calls.dispatch()
        calls.combine()
