"""The kernels of fused_a2a in the simulator against the reference, to the bit, forward and backward.

Random worlds: tests/fuzz.
"""

import numpy as np
import pytest
from against_reference import equal_hybrid, equal_rows
from rows_group import E4M3, assert_same, expect_nothing_left, fp8_pairs, group_of, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import buffers
from epmoe_ref import fused_a2a as reference
from epmoe_ref.strategies import HybridWorld, RowsWorld

pytestmark = pytest.mark.filterwarnings("error")


def equal_both(num_tokens, flags=None, sms=None, **grid):
    """Calls of both families on so many tokens of three ranks, two experts each, give what the reference does."""
    group, rng = group_of(3, **grid), np.random.default_rng(1)
    ids, probs = routing(rng, num_tokens, 6, 6)
    equal_rows(group, RowsWorld(tokens(rng, num_tokens, 8), ids, probs, 6), rng, **flags or {})
    maps = [rng.random((n, 6)) < 0.5 for n in num_tokens]
    equal_hybrid(
        group, HybridWorld(tokens(rng, num_tokens, 8), maps, probs, 2, None, 16, False, None), rng, **sms or {}
    )


@pytest.mark.parametrize("num_tokens", [(1, 0, 0), (0, 0, 0), (70, 3, 0)], ids=str)
@pytest.mark.by_day(1)
def test_ranks_with_nothing_and_ranks_with_more_than_others(num_tokens):
    equal_both(num_tokens)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sms, threads, seed", [(2, 64, None), (3, 32, 3), (5, 96, 4)])
def test_no_bit_depends_on_sms_threads_or_the_schedule(sms, threads, seed):
    fused_a2a.set_deepep_num_sms(1 if seed is None else sms)
    try:
        api = dict(num_sms_dispatch_api=sms, num_sms_combine_api=1)
        equal_both((5, 0, 2), sms=api, n_sms=sms, num_threads=threads, seed=seed)
    finally:
        fused_a2a.set_deepep_num_sms(None)


@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_no_bit_depends_on_async_flags(on_comm_stream):
    equal_both((5, 0, 2), dict(async_finish=True, allocate_on_comm_stream=on_comm_stream))


def test_more_local_experts_than_lanes_of_a_warp(tonight):
    """70 experts a rank (by day 34): numbers, expert rows and sums go in windows of 32."""
    rng, local = np.random.default_rng(2), 70 if tonight else 34
    maps = [rng.random((n, 2 * local)) < 0.6 for n in (5, 1)]
    probs = [rng.random(m.shape, np.float32) for m in maps]
    world = HybridWorld(tokens(rng, (5, 1), 8), maps, probs, local, None, 3, False, None)
    equal_hybrid(group_of(2, num_threads=64), world, rng, hidden=8)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("seed, lamport_rows", [(None, False), (1, False), (1, True)])
def test_a_token_is_sent_by_several_blocks_where_there_are_few(seed, lamport_rows):
    """1200 elements and what goes with them, by four blocks; with two tokens, by four each; with three, by two."""
    rng = np.random.default_rng(8)
    group = group_of(2, n_sms=12, num_threads=32, seed=seed, racecheck=True, lamport_rows=lamport_rows)
    for num_tokens in ((1, 2), (3, 0)):
        ids, probs = routing(rng, num_tokens, 4, 2)
        equal_rows(group, RowsWorld(tokens(rng, num_tokens, 1200), ids, probs, 4), rng)
    assert not group.machine.races


@pytest.mark.by_day(1)
@pytest.mark.parametrize("budget", [None, 9])
def test_rows_are_encoded_in_parts(budget):
    """1280 elements: two steps of 512 and half a step, in two parts; ten scales."""
    rng = np.random.default_rng(9)
    group = group_of(2, n_sms=3, num_threads=64, seed=2, racecheck=True)
    maps = [rng.random((n, 4)) < 0.5 for n in (3, 2)]
    probs = [rng.random(m.shape, np.float32) for m in maps]
    x = tokens(rng, (3, 2), 1280)
    equal_hybrid(group, HybridWorld(x, maps, probs, 2, budget, 4, True, None), rng)
    assert not group.machine.races


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "<u2", ">i2", ">i4", ">i8", ">u8"])
def test_ids_of_any_integer_type_and_byte_order(dtype):
    rng = np.random.default_rng(4)
    ids, probs = routing(rng, (3, 2), 4, 2, dropped=0 if "u" in dtype else 0.3)
    given = tokens(rng, (3, 2), 8), [a.astype(dtype) for a in ids], probs, 4
    assert_same(fused_a2a.fused_dispatch(*given, group_of(2))[:4], reference.dispatch_forward(*given)[:4], "results")


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.complex64, E4M3], ids=str)
def test_dispatch_moves_rows_of_any_type(dtype):
    rng = np.random.default_rng(5)
    ids, probs = routing(rng, (4, 3), 4, 2)
    x = [rng.integers(0, 256, (n, 32 * np.dtype(dtype).itemsize), np.uint8).view(dtype) for n in (4, 3)]
    *want, known = reference.dispatch_forward(x, ids, probs, 4)
    group = group_of(2)
    *got, handle = fused_a2a.fused_dispatch(x, ids, probs, 4, group)
    bits = [a.view(np.uint8) for a in want[0]]
    assert_same([np.asarray(a).view(np.uint8) for a in got[0]], bits, "recv_x")


@pytest.mark.parametrize("num_tokens, hidden", [((6, 3), 128), ((6, 3), 640), ((4, 1), 4480)])
def test_blockwise_fp8_travels_as_a_pair(num_tokens, hidden):
    """Also without signals, and then in several parts."""
    rng, group = np.random.default_rng(6), group_of(2, racecheck=True)
    ids, probs = routing(rng, num_tokens, 4, 2)
    equal_rows(group, RowsWorld(fp8_pairs(rng, num_tokens, hidden), ids, probs, 4), rng)
    expect_nothing_left(group, buffers.buffer_of(group))
