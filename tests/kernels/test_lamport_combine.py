"""Combine without signals: rows are polled until none of their words is ABSENT; results are those of the other way."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kernel_world import FastWorld
from rounds import run_round
from test_rounds import CASES

import epmoe_ref
from epmoe import layout
from epmoe.kernels import LaunchConfig, lamport
from epmoe.kernels.plain.arguments import DTYPES
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import PeerTimeout

CFG = EPConfig(n_ranks=3, n_experts=6, top_k=2, hidden=16, max_tokens_per_rank=4)
SUITING = [name for name, (cfg, *_) in CASES.items() if layout.has_lamport_buf(cfg)]
IDS = [[[0, 2], [4, 1]], [[3, -1], [5, 0]], [[2, 4], [1, 3]]]
TOKENS = [np.ones((2, 16), ml_dtypes.bfloat16)] * 3
WEIGHTS = [(np.ones((2, 2), np.float32),)] * 3


def make(cfg=CFG, **options):
    return FastWorld(cfg, fused=True, without_signals=True, **options)


def ones(world):
    """Expert outputs of all ranks."""
    return [np.ones((world.capacity, 16))] * 3


def nothing_is_left(world):
    """Whether the buffer and the counters are as before the first round."""
    for rank in range(world.cfg.n_ranks):
        assert (world.read(rank, "combine_lamport_buf") == layout.ABSENT).all()
        assert (world.read(rank, "combine_recv_count") == layout.MAX_FINITE).all()
        assert not world.read(rank, "A").any() and not world.read(rank, "D").any()
        world.raise_if_failed(rank)


OTHER_SHAPES = [("empty rank, three ranks", (5, 96)), ("empty rank, three ranks", (2, 32))]
OTHER_SHAPES += [(name, shape) for name in ("plain", "top 32") for shape in ((2, 32), (5, 96))]


@pytest.mark.parametrize("name, shape", [(name, (3, 64)) for name in SUITING] + OTHER_SHAPES, ids=str)
@pytest.mark.by_day(2)
def test_rounds_are_exact_and_leave_nothing_behind(name, shape):
    cfg, tokens, options = CASES[name]
    # what is strong is slow under the race detector
    world = make(cfg, launch=LaunchConfig(*shape), racecheck=cfg.hidden < 64, seed=shape[0])
    run_round(world, np.random.default_rng(len(name)), tokens, **options)
    nothing_is_left(world)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_words_that_are_absent_are_summed_up_as_nans(dtype):
    """A row full of all-ones words, and one with a single such number, do not keep their receiver waiting."""
    world = make(replace(CFG, combine_dtype=dtype), racecheck=True)
    rows = np.ones((world.capacity, 16), DTYPES[dtype])
    rows.view(np.uint8)[0] = 0xFF  # the whole row
    rows.view(np.uint8)[1, -rows.itemsize :] = 0xFF  # its last number
    for _ in range(2):
        found = world.dispatch(TOKENS, IDS)
        combined = world.combine([rows] * 3, found, WEIGHTS)
        wanted = epmoe_ref.combine(world.cfg, [rows] * 3, found, router_weights=[w for (w,) in WEIGHTS])
        for got, want in zip(combined, wanted):
            assert np.array_equal(got.astype(np.float64), want.astype(np.float64), equal_nan=True)
        assert any(np.isnan(want.astype(np.float64)).any() for want in wanted)
        nothing_is_left(world)


def test_it_is_the_choice_of_the_caller_and_of_configurations_with_few_rows():
    assert lamport.applies(CFG, True, "array") and not lamport.applies(CFG, False, "array")
    assert not lamport.applies(CFG, True, None), "rows that are not summed up have words of their own"
    many = EPConfig(4, 256, 8, 7168, 4096)
    assert not lamport.applies(many, True, "array")
    assert layout.has_lamport_buf(EPConfig(4, 256, 8, 7168, 128))
    for other in (dict(skip_a2a=True), dict(use_shmem=True, p2p_world_size=1), dict(n_experts=3 * 1024)):
        assert not layout.has_lamport_buf(replace(CFG, **other))


def test_a_rank_that_does_not_answer_is_named():
    world = make(timeout_s=0.01, expire_waits=True)
    found = world.dispatch(TOKENS, IDS)
    out = world.combine(ones(world), found, WEIGHTS, ranks=[0, 1])
    said = (
        r"rank 0, combine_wait: nothing, or not all, from src_rank 2 "
        r"\((rows of expert [45] are missing|no word that its combine has begun)\)"
    )
    with pytest.raises(PeerTimeout, match=said):
        world.raise_if_failed(0)
    (token,) = [t for t, ids in enumerate(IDS[0]) if not {4, 5} & set(ids)] or [None]
    assert token is None or (out[0][token] == 2).all()


def test_a_rank_without_rows_for_this_one_is_waited_for_too():
    """It may still read what this rank's next dispatch overwrites."""
    world = make(timeout_s=0.01, expire_waits=True)
    ids = [[[0, 1], [1, 0]]] * 3
    world.combine(ones(world), world.dispatch(TOKENS, ids), WEIGHTS, ranks=[0, 1])
    for rank in (0, 1):
        said = rf"rank {rank}, combine_wait: nothing, or not all, from src_rank 2 \(no word that its combine"
        with pytest.raises(PeerTimeout, match=said):
            world.raise_if_failed(rank)


def test_a_row_that_names_no_place_is_missed():
    world = make(timeout_s=0.01, expire_waits=True)
    found = world.dispatch(TOKENS, IDS)
    info = found[1].src_info.copy()
    info[0] = 4, 0  # max_tokens_per_rank is 4
    world.buffers["src_info", 1].write(info)
    world.combine(ones(world), found, WEIGHTS)
    failed = []
    for rank in range(3):
        try:
            world.raise_if_failed(rank)
        except PeerTimeout as error:
            assert "from src_rank 1 (rows of expert" in str(error) and "changed src_info" in str(error)
            failed.append(rank)
    assert len(failed) == 1, "only who misses a row says so"


def test_a_world_that_is_put_back_works_again():
    world = make(timeout_s=0.01, expire_waits=True)
    world.combine(ones(world), world.dispatch(TOKENS, IDS), WEIGHTS, ranks=[0, 1])
    world.put_back()
    combined = world.combine(ones(world), world.dispatch(TOKENS, IDS), WEIGHTS)
    for of_rank, ids in zip(combined, IDS):
        assert (of_rank == (np.array(ids) >= 0).sum(axis=1)[:, None]).all()
    nothing_is_left(world)
