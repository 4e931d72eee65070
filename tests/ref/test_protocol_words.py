"""The words of every region after each step, by hand and in random worlds; wrong orders are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from protocol_rounds import run

from epmoe_ref import EPConfig, EPLocalSyncCounters, EPStateError, EPValueError, strategies
from epmoe_ref.protocol import MAX_FINITE, STEPS, RankState, World, Write, dispatch_async
from epmoe_ref.words import in_token_order, may_be_under_way, words

CFG = EPConfig(2, 4, 2, 8, 3)
X = [np.arange(3 * 8).reshape(3, 8).astype(bfloat16), np.full((1, 8), 99).astype(bfloat16)]
IDS = [np.array([[0, 3], [3, -1], [3, 1]]), np.array([[2, 1]])]


def test_a_p2p_world_with_more_ranks_than_rank_completion_has_words_is_refused():
    with pytest.raises(EPValueError, match="p2p_world_size=9 must be at most 8, .*: use more p2p worlds"):
        World(EPConfig(9, 9, 1, 8, 1, p2p_world_size=9))


def by_hand():
    machine = World(CFG, fill=0xEE)
    for rank in range(2):
        machine.dispatch_async(rank, X[rank], IDS[rank])
    return machine


def test_after_dispatch_async_by_hand():
    first, second = by_hand().ranks
    assert first.region("reserved").tolist() == first.region("finished").tolist() == [[1, 0], [1, 3]]
    assert second.region("reserved").tolist() == [[0, 1], [1, 0]]
    assert first.region("rank_completion").tolist() == [2, 2, 0, 0, 0, 0, 0, 0]
    assert first.dispatch_recv_count.tolist() == [[1, 0], [1, 1]]  # of experts 0 and 1, by rank
    assert second.dispatch_recv_count.tolist() == [[0, 1], [3, 0]]
    message = second.dispatch_recv_buf[1, 0, 2]  # expert 3, from rank 0, place 2: token 2
    assert message[:16].view(bfloat16).tolist() == X[0][2].tolist()
    assert message[16:20].view(np.int32) == 2 and message[32:36].view(np.uint16).tolist() == [3, 1]
    assert (second.dispatch_recv_buf[0, 0] == 0xEE).all() and (second.dispatch_recv_buf[0, 1, 1:] == 0xEE).all()
    assert second.dispatch_recv_buf[0, 1, 0, 32:36].view(np.uint16).tolist() == [2, 1]
    empty = first.dispatch_recv_buf[0, 1]
    assert (empty == 0xEE).all()
    assert not first.ep_counters[16:].any()


def test_after_dispatch_wait_by_hand():
    machine = by_hand()
    d = machine.dispatch_wait(1)
    state = machine.ranks[1]
    assert d.src_info.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0]]
    assert d.row_offsets.tolist() == [0, 1, 4]
    assert state.region("A").tolist() == [[[1024, 0], [1025, 1]], [[1028, 3], [1028, 0]]]
    assert (state.dispatch_recv_count == MAX_FINITE).all()
    for name in ("reserved", "finished", "rank_completion", "D", "E", "F", "G"):
        assert not state.region(name).any()


def test_after_both_halves_of_combine_by_hand():
    machine = by_hand()
    d = [machine.dispatch_wait(rank) for rank in (1, 0)][::-1]
    for rank in range(2):
        machine.combine_async(rank, d[rank].output_tokens, d[rank].src_info)
    state = machine.ranks[0]
    # experts 0, 1 of rank 0; experts 2, 3 of rank 1
    assert state.combine_recv_count.tolist() == [[1, 0], [1, 3]]
    for token, slot in np.argwhere(IDS[0] >= 0):
        assert state.combine_recv_buf[token, slot].view(bfloat16).tolist() == X[0][token].tolist()
    assert (state.combine_recv_buf[1, 1] == 0xEE).all()  # no expert: nothing is sent
    machine.combine_wait(0)
    state = machine.ranks[0]
    assert (state.combine_recv_count == MAX_FINITE).all()
    scratch = [*range(16 + 8, 16 + 16)]  # B and C
    assert not np.delete(state.ep_counters, scratch).any()


def test_end_rows_of_region_a_include_shared_rows_and_padding():
    cfg = EPConfig(1, 2, 1, 128, 5, token_format="fp8_blockwise", fused_shared_expert=True)
    machine = World(cfg)
    machine.dispatch_async(0, np.ones((5, 128), bfloat16), np.array([[1], [0], [1], [1], [-1]]))
    d = machine.dispatch_wait(0)
    assert d.row_offsets.tolist() == [0, 8, 12, 16]
    assert machine.ranks[0].region("A").tolist() == [[[1024 + 9, 1]], [[1024 + 15, 3]]]


def test_only_peers_of_the_p2p_world_count_as_completed_and_skip_a2a_keeps_to_itself():
    x, ids = np.ones((2, 8), bfloat16), np.array([[0], [3]])
    cfg = EPConfig(4, 4, 1, 8, 2, p2p_world_size=2, use_shmem=True)
    state = dispatch_async(RankState.initial(cfg, 3), x, ids).state
    assert state.region("rank_completion").tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    step = dispatch_async(RankState.initial(EPConfig(4, 8, 1, 8, 2, p2p_world_size=2, skip_a2a=True), 1), x, ids)
    assert step.writes == [] and step.state.region("rank_completion").tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
    assert step.state.region("reserved").tolist() == [[0], [1]] == step.state.dispatch_recv_count.tolist()


def test_places_are_taken_in_the_order_of_claims():
    claims = [[2, 0], [0, 1], [2, 1], [1, 0], [0, 0]]
    step = dispatch_async(RankState.initial(CFG, 0), X[0], IDS[0], claims=claims)
    [messages] = [w.value for w in step.writes if w.region == "dispatch_recv_buf" and w.index[:2] == (1, 0)]
    assert messages[:, 16:20].view(np.int32)[:, 0].tolist() == [2, 0, 1]
    with pytest.raises(EPValueError, match="each of the 5"):
        dispatch_async(RankState.initial(CFG, 0), X[0], IDS[0], claims=claims[1:])


def test_a_signal_stands_after_the_messages_that_it_covers_and_every_expert_gets_one():
    step = dispatch_async(RankState.initial(CFG, 0), X[0], IDS[0])
    own = dispatch_async(RankState.initial(CFG, 0), X[0], IDS[0]).state
    assert [(w.dst_rank, w.region, w.index[:2]) for w in step.writes] == [
        (1, region, (local_expert, 0))
        for local_expert in range(2)
        for region in ("dispatch_recv_buf", "dispatch_recv_count")
    ]
    assert own.dispatch_recv_count[:, 0].tolist() == [1, 1]


def test_a_step_leaves_the_state_that_it_is_given_as_it_is():
    before = RankState.initial(CFG, 0)
    after = dispatch_async(before, X[0], IDS[0]).state
    assert not before.ep_counters.any() and before.next_step == "dispatch_async" and not before.dispatch_recv_buf.any()
    assert (before.dispatch_recv_count == MAX_FINITE).all() and after.next_step == "dispatch_wait"


def test_what_comes_from_another_p2p_world_may_be_under_way_until_the_wait():
    cfg = EPConfig(2, 4, 2, 8, 3, p2p_world_size=1, use_shmem=True)
    machine = World(cfg)
    for rank in range(2):
        machine.dispatch_async(rank, X[rank], IDS[rank])
    state = machine.ranks[1]
    may = may_be_under_way(state)
    assert may.tolist() == [[True, False], [True, False]] and not may_be_under_way(machine.ranks[0])[:, 0].any()
    without = RankState.initial(cfg, 1)  # as if nothing had arrived
    for name, held in (("dispatch_recv_count", without.dispatch_recv_count), ("dispatch_recv_buf", None)):
        held = in_token_order(cfg, without.dispatch_recv_buf, state.messages_here)[0] if held is None else held
        # its own have arrived
        assert len(words(state)[name].wrong(held)) > len(words(state, may)[name].wrong(held)) > 0
    d = [machine.dispatch_wait(rank) for rank in range(2)]
    assert not may_be_under_way(machine.ranks[1]).any()
    for rank in range(2):
        machine.combine_async(rank, d[rank].output_tokens, d[rank].src_info)
    fixed, free = (words(machine.ranks[1], under_way)["combine_recv_buf"].free for under_way in (None, may))
    # experts 2 and 1: of ranks 1 and 0
    assert not fixed[0].any() and free[0].all(axis=-1).tolist() == [False, True]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_after_conditions_hold_after_every_step_of_random_worlds(data):
    cfg = data.draw(strategies.configs())
    rounds = [data.draw(strategies.worlds(cfg, kinds=("integers",))) for _ in range(2)]

    def check(machine, rank):
        state = machine.ranks[rank]
        done = STEPS[STEPS.index(state.next_step) - 1]
        nonzero = {
            name
            for name, (start, size) in EPLocalSyncCounters[cfg.n_experts].regions().items()
            if state.ep_counters[start : start + size].any()
        } - {"B", "C"}
        allowed = {
            "dispatch_async": {"reserved", "finished", "rank_completion"},
            "dispatch_wait": {"A"},
            "combine_async": {"A"},
            "combine_wait": set(),
        }[done]
        assert nonzero <= allowed
        if done == "dispatch_wait":
            assert (state.dispatch_recv_count == MAX_FINITE).all()
        if done == "combine_wait":
            assert (state.combine_recv_count == MAX_FINITE).all()
        for name, fixed in words(state).items():
            got = state.region(name)
            if name == "dispatch_recv_buf":
                got = in_token_order(cfg, got, state.messages_here)[0]
            assert not len(fixed.wrong(got)), "the model keeps its own rules"

    run(cfg, rounds, data.draw(st.integers(0, 2**31)), after_step=check)


def test_another_order_than_the_four_steps_is_refused():
    machine = by_hand()
    with pytest.raises(EPStateError, match="rank 0: dispatch_async before dispatch_wait"):
        machine.dispatch_async(0, X[0], IDS[0])
    d = machine.dispatch_wait(0)
    for wrong in (
        lambda: machine.dispatch_async(0, X[0], IDS[0]),
        lambda: machine.dispatch_wait(0),
        lambda: machine.combine_wait(0),
    ):
        with pytest.raises(EPStateError):
            wrong()
    machine.combine_async(0, d.output_tokens, d.src_info)
    with pytest.raises(EPStateError, match="combine_async before combine_wait"):
        machine.combine_async(0, d.output_tokens, d.src_info)
    assert machine.ready() == [1]  # rank 0 waits for rank 1's rows


def test_a_wait_without_all_signals_names_the_missing_ones():
    machine = World(CFG)
    machine.dispatch_async(0, X[0], IDS[0])
    with pytest.raises(EPStateError, match=r"dispatch_recv_count has not arrived from .* \(0, 1\), \(1, 1\)"):
        machine.dispatch_wait(0)
    assert machine.ready() == [1]


def test_a_second_signal_before_the_first_is_taken_is_refused():
    state = RankState.initial(CFG, 0).received([Write(0, "dispatch_recv_count", (1, 1), 2)])
    with pytest.raises(EPStateError, match=r"second signal for dispatch_recv_count\[1, 1\], which holds 2"):
        state.received([Write(0, "dispatch_recv_count", (1, 1), 3)])


def test_refusals():
    with pytest.raises(EPValueError, match=r"expert_outputs of rank 0 is float32\[3, 8\]"):
        machine = by_hand()
        machine.dispatch_wait(0)
        machine.combine_async(0, np.zeros((3, 8), np.float32), np.zeros((3, 2), np.int32))
