"""A rank that does not come: the others give up in time, say who is missing, and copy nothing that did not arrive."""

import ml_dtypes
import numpy as np
import pytest
from kernel_world import FastWorld

from epmoe.kernels import status
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import PeerTimeout

CFG = EPConfig(n_ranks=3, n_experts=6, top_k=2, hidden=8, max_tokens_per_rank=4)
IDS = [np.array([[0, 2], [3, 5]])] * 3
TOKENS = [np.ones((2, 8), ml_dtypes.bfloat16)] * 3
WEIGHTS = [(np.ones((2, 2), np.float32),)] * 3


def make(fused, **options):
    return FastWorld(CFG, fused=fused, seed=1, timeout_s=0.01, expire_waits=True, racecheck=True, **options)


def ones(world):
    """Expert outputs of all ranks."""
    return [np.ones((world.capacity, 8))] * 3


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_dispatch_names_the_rank_that_did_not_send(fused):
    world = make(fused)
    results = world.dispatch(TOKENS, IDS, ranks=[0, 2])
    for rank in (0, 2):
        first = 2 * rank
        with pytest.raises(
            PeerTimeout,
            match=(
                f"rank {rank}, dispatch_wait: no signal from src_rank 1 "
                f"\\(2 of 2 experts: {first}, {first + 1}\\); gave up after timeout=0.01 s"
            ),
        ):
            world.raise_if_failed(rank)
        assert (results[rank].output_tokens.view(np.uint16) == 0xFFFF).all(), "a row was written"
    world.raise_if_failed(1)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_combine_names_the_rank_that_did_not_answer(fused):
    world = make(fused)
    out = world.combine(ones(world), world.dispatch(TOKENS, IDS), WEIGHTS, ranks=[1])
    with pytest.raises(PeerTimeout, match="rank 1, combine_wait: no signal from src_rank 0 .*; src_rank 2 "):
        world.raise_if_failed(1)
    assert (out[1].view(np.uint16) == 0xFFFF).all(), "an output token was written"


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_kernels_behind_a_failed_one_end_at_once_and_send_nothing(fused):
    world = make(fused)
    results = world.dispatch(TOKENS, IDS, ranks=[0])
    before = [world.read(r, "combine_recv_count") for r in range(3)]
    world.combine(ones(world), results, WEIGHTS, ranks=[0])
    for rank in range(3):
        assert (world.read(rank, "combine_recv_count") == before[rank]).all(), "a signal was sent"
    with pytest.raises(PeerTimeout, match="rank 0, dispatch_wait"):
        world.raise_if_failed(0)


def test_signals_that_come_late_are_told_apart():
    world = make(False)
    world.dispatch(TOKENS, IDS, ranks=[0, 2])
    words, empty = world.read(0, "status"), np.zeros((2, 3), np.uint64)
    with pytest.raises(PeerTimeout, match="signals came after the timeout"):
        status.raise_if_failed(words, CFG, 0, 0.01, empty)


def test_dispatch_needs_no_two_blocks_at_once():
    """Only one block of three at a time: senders wait for nobody, and come before those who wait for them."""
    for fused in (False, True):
        world = make(fused, resident_limit=1)
        results = world.dispatch(TOKENS, IDS)
        for rank in range(3):
            world.raise_if_failed(rank)
            assert results[rank].row_offsets[-1] == sum((np.array(ids) // 2 == rank).sum() for ids in IDS)


def test_blocks_of_combine_that_cannot_run_together_say_so():
    """The first block returns its rows and waits for those of blocks that never start."""
    world = make(True)
    results = world.dispatch(TOKENS, IDS)
    world.machine.resident_limit = 1
    world.combine(ones(world), results, WEIGHTS)
    with pytest.raises(PeerTimeout, match="combine_wait: no signal from src_rank"):
        world.raise_if_failed(0)


def test_a_world_that_is_put_back_works_again():
    """What a reset has to restore is exactly the initial values of the layout."""
    world = make(True)
    world.dispatch(TOKENS, IDS, ranks=[0, 2])
    world.put_back()
    results = world.dispatch(TOKENS, IDS)
    assert [d.row_offsets.tolist() for d in results] == [[0, 3, 3], [0, 3, 6], [0, 0, 3]]
    for rank in range(3):
        world.raise_if_failed(rank)
