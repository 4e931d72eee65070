"""Ids that no expert has, and repeated ids: treated as -1, counted, and never a reason to write where one must not."""

import ml_dtypes
import numpy as np
import pytest
from kernel_world import KernelWorld
from protocol_model import check_dispatch, clean, combine
from test_dispatch_combine_rounds import assert_clean, rows_of

from epmoe.kernels import LaunchConfig, status
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

CFG = EPConfig(n_ranks=2, n_experts=6, top_k=4, hidden=16, max_tokens_per_rank=12)
KINDS = {
    "any int32": lambda rng, shape: rng.integers(-(2**31), 2**31, shape),
    "near the range": lambda rng, shape: rng.integers(-2, CFG.n_experts + 2, shape),
    "one id": lambda rng, shape: np.full(shape, 3),
    "multiples of 2**16": lambda rng, shape: rng.integers(0, CFG.n_experts, shape) + 65536 * rng.integers(-1, 2, shape),
    "any int64": lambda rng, shape: rng.choice(
        [0, 5, -1, -2, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**31), -(2**32) + 2, -(2**63)], shape
    ),
}
FOUR_BLOCKS = LaunchConfig(n_sms=4, num_threads=64)  # enough for the way of small batches


@pytest.mark.by_day(5)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_ids_send_nothing_and_hurt_nobody(kind, fused):
    rng = np.random.default_rng(3)
    wide = dict(id_bytes=8, launch=FOUR_BLOCKS) if kind == "any int64" else {}
    world = KernelWorld(CFG, fused=fused, seed=2, racecheck=True, **wide)
    n = [12, 7]
    ids = [KINDS[kind](rng, (i, CFG.top_k)) for i in n]
    tokens = [rows_of(rng, i, CFG) for i in n]
    rows = []
    for rank, d in enumerate(world.dispatch(tokens, ids)):
        origin = check_dispatch(CFG, rank, ids, d)
        block = np.zeros((world.capacity(), CFG.hidden), ml_dtypes.bfloat16)
        block[: len(origin)] = [tokens[src][t] for src, t, _ in origin] if origin else 0
        rows.append(block)
        check_counts(world, rank, ids[rank])
        clear_status(world, rank)
    weights = [rng.random((i, CFG.top_k)).astype(np.float32) for i in n]
    out = world.combine(rows, n, weights)
    for rank in range(2):
        expected = combine(
            CFG, rank, ids, lambda src, t, e: tokens[src][t], weights[rank], np.dtype(ml_dtypes.bfloat16)
        )
        assert (out[rank].view(np.uint16) == expected.view(np.uint16)).all()
    assert_clean(world)


def check_counts(world, rank, ids):
    words = world.read(rank, "status")
    refused = (clean(CFG, ids) == -1) & (ids != -1)
    inside = (ids >= 0) & (ids < CFG.n_experts)
    assert words[status.BAD_IDS] == (refused & ~inside).sum()
    assert words[status.REPEATED_IDS] == (refused & inside).sum()
    assert not words[status.FAILED]
    if refused.any():
        token, k = words[status.BAD_TOKEN] - 1, words[status.BAD_K]
        recorded = as_int32(int(ids[token, k]))
        assert refused[token, k] and recorded == words[status.BAD_ID]
        with pytest.raises(EPValueError, match=f"rank {rank}: topk_ids\\[{token}, {k}\\] is {recorded}"):
            status.raise_if_bad_ids(words, CFG, rank)
    else:
        status.raise_if_bad_ids(words, CFG, rank)


def as_int32(value):
    """What the kernels make of an id of 64 bits."""
    if -(2**31) <= value < 2**31:
        return value
    return 2**31 - 1 if value > 0 else 1 - 2**31


def clear_status(world, rank):
    from epmoe import layout

    region = layout.region(CFG, "status")
    world.base[rank].write(np.zeros(region.shape, np.int32), region.offset)


def test_empty_slots_are_not_counted():
    world = KernelWorld(CFG)
    world.dispatch([np.zeros((2, CFG.hidden), ml_dtypes.bfloat16)] * 2, [np.full((2, 4), -1)] * 2)
    for rank in range(2):
        status.raise_if_bad_ids(world.read(rank, "status"), CFG, rank)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_src_info_out_of_range_writes_nothing(fused):
    """A caller that spoils src_info between dispatch and combine loses those rows, and nobody else's memory."""
    rng = np.random.default_rng(5)
    world = KernelWorld(CFG, fused=fused, seed=4)
    ids = [np.array([[0, 3, 1, 4]] * 3)] * 2
    tokens = [rows_of(rng, 3, CFG) for _ in range(2)]
    world.dispatch(tokens, ids)
    spoiled = np.array([[-1, 0], [12, 0], [0, 4], [0, -1], [2**31 - 1, 2**31 - 1], [-(2**31), -(2**31)]], np.int32)
    for rank in range(2):
        world.buffers["src_info", rank].write(spoiled)
        before = world.read(rank, "combine_recv_buf")
        assert (before == 0xFF).all()
    rows = [np.zeros((world.capacity(), CFG.hidden), ml_dtypes.bfloat16)] * 2
    world.combine(rows, [0, 0], [np.zeros((0, 4), np.float32)] * 2)
    for rank in range(2):
        # each rank was to get 12 rows back, and 3 of them went nowhere on either rank
        untouched = (world.read(rank, "combine_recv_buf").reshape(12, 4, -1) == 0xFF).all(axis=2)
        assert untouched.sum() == 48 - 6
    assert_clean(world)
