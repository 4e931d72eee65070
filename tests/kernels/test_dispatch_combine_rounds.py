"""Dispatch and combine, split and fused: rounds follow one another without a host reset, and each is exact."""

import ml_dtypes
import numpy as np
import pytest
from kernel_world import COMBINE, KernelWorld
from protocol_model import check_dispatch, combine, share

from epmoe_ref.config import EPConfig


def case(tokens, top_k=2, *, hot=None, **sizes):
    """Tokens of each rank, a configuration for them, and perhaps an expert that most tokens select."""
    sizes = dict(n_experts=4, hidden=16, max_tokens_per_rank=6) | sizes
    cfg = dict(n_ranks=len(tokens), top_k=top_k) | sizes
    return dict(cfg=cfg, tokens=tokens) | ({} if hot is None else dict(hot=hot))


CASES = {
    "plain": case([5, 6]),
    "empty rank, three ranks": case([7, 0, 3], 3, n_experts=9, hidden=24, max_tokens_per_rank=7),
    "one rank": case([9], 3, n_experts=3, hidden=8, max_tokens_per_rank=9),
    "nobody has a token": case([0, 0], 1, n_experts=2, hidden=8, max_tokens_per_rank=2),
    "hot expert": case([12, 9], 1, n_experts=8, hidden=40, max_tokens_per_rank=12, hot=5),
    "many experts, wide rows": case([3, 1], 3, n_experts=80, hidden=1288, max_tokens_per_rank=3, alignment=64),
    "top 32": case([1, 2], 32, n_experts=34, hidden=8, max_tokens_per_rank=2),
    "fp32": case([5, 6], 3, combine_dtype="fp32"),
    "fp16": case([5, 6], 3, combine_dtype="fp16"),
    "shared expert": case([5, 3], n_experts=6, max_tokens_per_rank=5, fused_shared_expert=True),
    "skip_a2a": case([5, 5], 3, n_experts=6, max_tokens_per_rank=5, skip_a2a=True, p2p_world_size=1),
    "skip_a2a, shared expert": case(
        [4, 4, 4],
        3,
        n_experts=6,
        max_tokens_per_rank=5,
        skip_a2a=True,
        fused_shared_expert=True,
        allreduce_world_size=3,
    ),
    "fp8 rows padded to 4": case([5, 6], hidden=128, token_format="fp8_blockwise", fused_shared_expert=True),
    "nvfp4": case([5, 6], hidden=64, token_format="nvfp4"),
}
COUNTERS = "reserved", "finished", "rank_completion", "D", "E", "F", "G"
ZERO_AFTER_DISPATCH = *COUNTERS, "combine_ready", "status"


def routing(case, cfg, rng):
    """Distinct ids a token, some slots -1; the same for all ranks under skip_a2a."""
    ids = []
    for n in case["tokens"]:
        rows = (
            np.stack([rng.permutation(cfg.n_experts)[: cfg.top_k] for _ in range(n)])
            if n
            else np.zeros((0, cfg.top_k), int)
        )
        if "hot" in case:
            rows[rng.random(rows.shape) < 0.8] = case["hot"]
        rows[rng.random(rows.shape) < 0.15] = -1
        ids.append(rows)
    return [ids[0]] * cfg.n_ranks if cfg.skip_a2a else ids


def rows_of(rng, n, cfg):
    return rng.normal(size=(n, cfg.hidden)).astype(ml_dtypes.bfloat16)


def pad_rows(cfg):
    return 4 if cfg.token_format == "fp8_blockwise" else 1


def run_round(world, case, rng):
    """One dispatch and one combine with experts that are not the identity; everything is checked."""
    cfg = world.cfg
    dtype = COMBINE[cfg.combine_dtype]
    ids = routing(case, cfg, rng)
    tokens = [rows_of(rng, len(i), cfg) for i in ids]
    if cfg.skip_a2a:
        tokens = [tokens[0]] * cfg.n_ranks
    dispatched = world.dispatch(tokens, ids)
    scale = rng.normal(size=(cfg.n_experts, cfg.hidden)).astype(np.float32)
    shared_scale = rng.normal(size=cfg.hidden).astype(np.float32)
    outputs = []
    for rank, d in enumerate(dispatched):
        origin = check_dispatch(cfg, rank, ids, d, pad_rows(cfg))
        assert_dispatch_is_over(world, rank, d)
        rows = np.full((world.capacity(), cfg.hidden), np.nan, dtype)
        for i, source in enumerate(origin):
            if source is None:
                continue
            src, t, group = source
            if cfg.token_format == "bf16":
                assert (d["output_tokens"][i] == tokens[src][t]).all(), f"rank {rank} row {i}: token {t} of rank {src}"
            front = int(cfg.fused_shared_expert)
            factor = shared_scale if group < front else scale[rank * cfg.n_local_experts + group - front]
            rows[i] = (tokens[src][t].astype(np.float32) * factor).astype(dtype)
        if cfg.token_format == "bf16":
            behind = d["output_tokens"][len(origin) :].view(np.uint16)
            assert (behind == 0xFFFF).all(), "rows behind the last one were written"
        outputs.append(rows)
    weights = [rng.random((len(i), cfg.top_k)).astype(np.float32) for i in ids]
    for w, i in zip(weights, ids):
        w[i < 0] = np.nan  # the weight of an empty slot must not matter
    weights = [weights[0]] * cfg.n_ranks if cfg.skip_a2a else weights
    combined = world.combine(outputs, [len(i) for i in ids], None if world.unreduced else weights)
    for rank in range(cfg.n_ranks):
        first, count = share(cfg, len(ids[rank]), rank)
        expected = combine(
            cfg,
            rank,
            ids,
            lambda src, t, e: (tokens[src][t].astype(np.float32) * scale[e]).astype(dtype),
            None if world.unreduced else weights[rank],
            dtype,
            lambda t: (
                (tokens[rank][t].astype(np.float32) * shared_scale).astype(dtype)
                if first <= t < first + count
                else None
            ),
        )
        unsigned = np.dtype(f"u{dtype.itemsize}")
        got = combined[rank]
        assert got.shape == expected.shape
        wrong = np.argwhere(got.view(unsigned) != expected.view(unsigned))
        assert not len(wrong), (
            f"rank {rank}, first difference at {wrong[0]}: {got[tuple(wrong[0])]} "
            f"instead of {expected[tuple(wrong[0])]}"
        )
    assert_clean(world)


def assert_dispatch_is_over(world, rank, d):
    """The after-conditions of dispatch_wait: all is put back but region A, which says what combine has to send."""
    for name in ZERO_AFTER_DISPATCH:
        assert not world.read(rank, name).any(), f"{name} of rank {rank} after dispatch"
    assert (world.read(rank, "dispatch_recv_count") == 2**64 - 1).all()
    a, front = world.read(rank, "A"), int(world.cfg.fused_shared_expert)
    assert (a[:, :, 1] == d["counts"]).all()
    starts = d["row_offsets"][front:-1].astype(int)
    assert (a[:, :, 0] == 1024 + starts[:, None] + np.cumsum(d["counts"], axis=1)).all()


def assert_clean(world):
    """The after-conditions of combine_wait, and with them of the round: the memory is as before the first."""
    for rank in range(world.cfg.n_ranks):
        for name in (*ZERO_AFTER_DISPATCH, "A"):
            assert not world.read(rank, name).any(), f"{name} of rank {rank} after a round"
        for name in ("dispatch_recv_count", "combine_recv_count"):
            assert (world.read(rank, name) == 2**64 - 1).all(), f"{name} of rank {rank} after a round"


@pytest.mark.by_day(5)
@pytest.mark.racecheck
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_rounds_are_exact_and_leave_the_memory_as_it_was(name, fused):
    case = CASES[name]
    world = KernelWorld(EPConfig(**case["cfg"]), fused=fused, seed=1, racecheck=True)
    rng = np.random.default_rng(7)
    for _ in range(2):
        run_round(world, case, rng)
