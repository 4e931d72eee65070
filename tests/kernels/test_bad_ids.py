"""Ids that no expert has, and repeated ids: treated as -1, counted, and never a reason to write where one must not."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_world import FastWorld
from ml_dtypes import bfloat16
from rounds import assert_after_combine, assert_dispatched, assert_same, expert_outputs, normal
from test_rounds import WORLDS

import epmoe_ref
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


def clean(topk_ids):
    """Ids outside [0, n_experts) and later occurrences in a token become -1."""
    cleaned = np.full(topk_ids.shape, -1, np.int32)
    for token, ids in enumerate(topk_ids.tolist()):
        for k, e in enumerate(ids):
            if 0 <= e < CFG.n_experts and e not in ids[:k]:
                cleaned[token, k] = e
    return cleaned


@pytest.mark.by_day(9)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("kind, kernels", [(k, w) for w in WORLDS for k in KINDS if (k, w) != ("any int64", "plain")])
def test_garbage_ids_send_nothing_and_hurt_nobody(kind, kernels, fused):
    rng = np.random.default_rng(3)
    wide = dict(ids_dtype=np.int64, launch=FOUR_BLOCKS) if kind == "any int64" else {}
    world = WORLDS[kernels](CFG, fused=fused, seed=2, racecheck=True, **wide)
    ids = [KINDS[kind](rng, (n, CFG.top_k)) for n in (12, 7)]
    tokens = [normal(rng, len(i), CFG.hidden) for i in ids]
    got, wanted = world.dispatch(tokens, ids), epmoe_ref.dispatch(CFG, tokens, [clean(i) for i in ids])
    for rank in range(2):
        assert_dispatched(CFG, rank, got[rank], wanted[rank])
        check_counts(world, rank, ids[rank])
        if kernels == "plain":  # whose combine cleans what it is given by the same rule
            world.buffers["clean_topk_ids", rank].write(ids[rank].astype(np.int32))
    weights, outputs = [normal(rng, *i.shape, dtype=np.float32) for i in ids], expert_outputs(world, rng, got)
    for w, i in zip(weights, ids):
        w[clean(i) < 0] = np.nan
    combined = world.combine(outputs, got, [(w,) for w in weights])
    right = epmoe_ref.combine(CFG, outputs, got, router_weights=weights)
    for rank in range(2):
        assert_same(combined[rank], right[rank], f"combined of rank {rank}")
    assert_after_combine(world)


def check_counts(world, rank, ids):
    words = world.read(rank, "status")
    refused = (clean(ids) == -1) & (ids != -1)
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


def test_empty_slots_are_not_counted():
    world = FastWorld(CFG)
    world.dispatch([np.zeros((2, CFG.hidden), bfloat16)] * 2, [np.full((2, 4), -1)] * 2)
    for rank in range(2):
        status.raise_if_bad_ids(world.read(rank, "status"), CFG, rank)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("kernels", WORLDS)
def test_src_info_out_of_range_writes_nothing(kernels, fused):
    """A caller that spoils src_info between dispatch and combine loses those rows, and nobody else's memory."""
    rng = np.random.default_rng(5)
    world = WORLDS[kernels](CFG, fused=fused, seed=4)
    ids = [np.array([[0, 3, 1, 4]] * 3)] * 2
    found = world.dispatch([normal(rng, 3, CFG.hidden) for _ in range(2)], ids)
    spoiled = np.array([[-1, 0], [12, 0], [0, 4], [0, -1], [2**31 - 1, 2**31 - 1], [-(2**31), -(2**31)]], np.int32)
    for rank in range(2):
        world.buffers["src_info", rank].write(spoiled)
        before = world.read(rank, "combine_recv_buf")
        assert (before == 0xFF).all()
    rows, of_no_token = [np.zeros((world.capacity, CFG.hidden))] * 2, [replace(d, num_tokens=0) for d in found]
    world.combine(rows, of_no_token, [(np.zeros((0, 4), np.float32),)] * 2)
    for rank in range(2):
        # each rank was to get 12 rows back, and 3 of them went nowhere on either rank
        untouched = (world.read(rank, "combine_recv_buf").reshape(12, 4, -1) == 0xFF).all(axis=2)
        assert untouched.sum() == 48 - 6
    assert_after_combine(world)
