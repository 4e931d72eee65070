"""Few tokens by expert, whose rows leave before any rank has said anything: at most four a rank in the simulator."""

from functools import partial

import numpy as np
from absent_rank import TIMEOUT_S, expect_named, without
from against_reference import equal_hybrid
from rows_group import expect_nothing_left, group_of, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import buffers
from epmoe.kernels.rows.shape import SMALL
from epmoe_ref.strategies import HybridWorld

FEW = SMALL.lamport_tokens


def checked(seed, n_ranks, n_sms=3, num_threads=64, **options):
    """(a group that looks for races, a generator of random numbers)."""
    grid = dict(n_sms=n_sms, num_threads=num_threads, seed=seed, racecheck=True)
    return group_of(n_ranks, **grid, **options), np.random.default_rng(seed)


def equal_calls(group, rng, num_tokens_of_calls, local, hidden, num_rows, pad=None, *, fp8=False, has_probs=True):
    """Dispatches and combines of so many tokens, one after another on one Buffer, are the reference's."""
    for num_tokens in num_tokens_of_calls:
        maps = [rng.random((n, len(num_tokens) * local)) < 0.5 for n in num_tokens]
        probs = [rng.random(m.shape, np.float32) for m in maps] if has_probs else None
        x = tokens(rng, num_tokens, hidden)
        equal_hybrid(group, HybridWorld(x, maps, probs, local, num_rows, pad, fp8, None), rng)
        expect_nothing_left(group, buffers.hybrid_ep_buffer(group))


def test_few_and_many_tokens_take_turns(tonight):
    """One rank with many is enough for all to go the ordinary way, and what few had sent is not looked at."""
    calls = [(1, 0, FEW), (0, FEW + 1, 1), (FEW, FEW, 0)]
    equal_calls(*checked(1, 3, n_sms=2, num_threads=32), calls if tonight else calls[:2], 2, 8, 20, 3)


def test_encoded_rows_in_parts():
    """1280 elements: two parts of a row, the second a half step of the encoder; ten scales."""
    calls = [(2, 1), (FEW + 1, 0)]  # the second the ordinary way: what few had sent is erased
    equal_calls(*checked(2, 2), calls, 2, 1280, 20, 4, fp8=True)


def test_more_local_experts_than_lanes_and_one_warp_a_block():
    equal_calls(*checked(3, 2, n_sms=2, num_threads=32), [(FEW, 1)], 34, 8, 120)


def test_rows_without_room_are_dropped_and_those_without_a_token_are_zeros():
    """More blocks than anything is shared among; no probs; the reference drops rows from the end, and so do we."""
    group, rng = checked(4, 2, n_sms=12, num_threads=32)
    equal_calls(group, rng, [(3, 1), (1, 0)], 3, 8, 5, 2, has_probs=False)


def test_a_rank_by_itself():
    equal_calls(*checked(5, 1, num_threads=32), [(FEW,), (1,)], 4, 256, 12, fp8=True)


def test_a_rank_that_does_not_come_is_named_and_reset_helps(monkeypatch):
    group, rng = group_of(2, timeout=TIMEOUT_S, expire_waits=True), np.random.default_rng(7)
    buffer = buffers.hybrid_ep_buffer(group)
    equal_calls(group, rng, [(FEW, 1)], 2, 8, 16)
    maps = [np.ones((n, 4), bool) for n in (FEW, 1)]
    with monkeypatch.context() as patch:
        without(buffer, 1, patch)
        given = tokens(rng, (FEW, 1), 8), maps, None, group, 2
        expect_named("dispatch of rows", partial(fused_a2a.hybrid_ep_dispatch, num_permuted_tokens=16), *given)
    buffer.reset()
    equal_calls(group, rng, [(FEW, 1)], 2, 8, 16)
