"""Few tokens by expert, whose rows leave before any rank has said anything: at most four a rank in the simulator."""

import numpy as np
import pytest
from absent_rank import without
from against_reference import equal_hybrid
from rows_group import expect_nothing_left, group_of, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import buffers
from epmoe.kernels.rows.shape import SMALL
from epmoe_ref.errors import PeerTimeout
from epmoe_ref.strategies import HybridWorld

FEW = SMALL.lamport_tokens


def equal_calls(
    group, rng, num_tokens_of_calls, local, hidden, num_rows, pad=None, *, fp8=False, has_probs=True
):
    """Dispatches and combines of so many tokens, one after another on one Buffer, are the reference's."""
    for num_tokens in num_tokens_of_calls:
        maps = [rng.random((n, len(num_tokens) * local)) < 0.5 for n in num_tokens]
        probs = [rng.random(m.shape, np.float32) for m in maps] if has_probs else None
        x = tokens(rng, num_tokens, hidden)
        equal_hybrid(group, HybridWorld(x, maps, probs, local, num_rows, pad, fp8, None), rng)
        expect_nothing_left(group, buffers.hybrid_ep_buffer(group))


def test_few_and_many_tokens_take_turns(tonight):
    """One rank with many is enough for all to go the ordinary way, and what few had sent is not looked at."""
    group, rng = (
        group_of(3, n_sms=3, num_threads=64, seed=1, racecheck=True),
        np.random.default_rng(1),
    )
    calls = [(1, 0, FEW), (2, FEW + 1, 1), (FEW, FEW, 0)]
    equal_calls(group, rng, calls if tonight else calls[:2], 2, 8, 20, 3)


def test_encoded_rows_in_parts(tonight):
    """1280 elements: two parts of a row, the second a half step of the encoder; ten scales."""
    group, rng = (
        group_of(2, n_sms=3, num_threads=64, seed=2, racecheck=True),
        np.random.default_rng(2),
    )
    calls = [
        (FEW, 1),
        (FEW + 1, 2),
    ]  # the second the ordinary way, as in tests/fused_a2a/test_fused_a2a_kernels.py
    equal_calls(group, rng, calls if tonight else calls[:1], 2, 1280, 20, 4, fp8=True)


def test_more_local_experts_than_lanes_and_one_warp_a_block():
    group, rng = (
        group_of(2, n_sms=2, num_threads=32, seed=3, racecheck=True),
        np.random.default_rng(3),
    )
    equal_calls(group, rng, [(FEW, 3)], 40, 8, 200)


def test_rows_without_room_are_dropped_and_those_without_a_token_are_zeros():
    """More blocks than anything is shared among; no probs; the reference drops rows from the end, and so do we."""
    group, rng = (
        group_of(2, n_sms=12, num_threads=32, seed=4, racecheck=True),
        np.random.default_rng(4),
    )
    equal_calls(group, rng, [(FEW, 3), (1, 1)], 3, 16, 9, 2, has_probs=False)


def test_a_rank_by_itself():
    group, rng = group_of(1, n_sms=3, seed=5, racecheck=True), np.random.default_rng(5)
    equal_calls(group, rng, [(FEW,), (1,)], 4, 256, 12, fp8=True)


def test_no_rank_knows_how_many_tokens_the_others_have(tonight):
    group, rng = (
        group_of(2, knows_all_ranks=False, seed=6, racecheck=True),
        np.random.default_rng(6),
    )
    calls = [(2, 2), (FEW + 2, FEW + 2), (FEW, FEW), (1, FEW)]
    equal_calls(group, rng, calls if tonight else calls[:2], 2, 8, 24)


def test_a_rank_that_does_not_come_is_named_and_reset_helps(monkeypatch):
    group, rng = group_of(2, timeout=0.01, expire_waits=True), np.random.default_rng(7)
    buffer = buffers.hybrid_ep_buffer(group)
    equal_calls(group, rng, [(FEW, 1)], 2, 8, 16)
    maps = [np.ones((n, 4), bool) for n in (FEW, 1)]
    with monkeypatch.context() as patch:
        without(buffer, 1, patch)
        with pytest.raises(
            PeerTimeout, match="rank 0, dispatch of rows: src_rank 1 did not begin the call"
        ):
            fused_a2a.hybrid_ep_dispatch(
                tokens(rng, (FEW, 1), 8), maps, None, group, 2, num_permuted_tokens=16
            )
    buffer.reset()
    equal_calls(group, rng, [(FEW, 1)], 2, 8, 16)
