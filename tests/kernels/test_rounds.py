"""Dispatch and combine, split and fused, fast and plain: rounds follow one another without a host reset; each is exact."""

import numpy as np
import pytest
from kernel_world import FastWorld
from plain_world import PlainWorld
from rounds import run_round

from epmoe_ref.config import EPConfig

WORLDS = {"fast": FastWorld, "plain": PlainWorld}


def case(tokens, top_k=2, *, hot=None, **sizes):
    """(a configuration, tokens of each rank, options of run_round). hot: an expert that most tokens select."""
    sizes = dict(n_experts=4, hidden=16, max_tokens_per_rank=6) | sizes
    options = {} if hot is None else dict(hot=hot)
    if sizes.get("token_format") == "nvfp4":
        options["input_scale"] = 0.375
    return EPConfig(n_ranks=len(tokens), top_k=top_k, **sizes), tokens, options


CASES = {
    "plain": case([5, 6]),
    "empty rank, three ranks": case([7, 0, 3], 3, n_experts=9, hidden=24, max_tokens_per_rank=7),
    "fp8 rows padded to 4": case([5, 6], hidden=128, token_format="fp8_blockwise", fused_shared_expert=True),
    "nvfp4": case([5, 6], hidden=64, token_format="nvfp4"),
    "mxfp4": case([4, 3], hidden=128, token_format="mxfp4"),
    "mxfp8": case([4, 3], hidden=128, token_format="mxfp8"),
    "mxfp4_rows": case([4, 3], hidden=32, token_format="mxfp4_rows"),
    "shuffled scales": case([4, 3], hidden=256, token_format="mxfp4_rows", fuse_a_scale_preshuffle=True),
    "one rank": case([9], 3, n_experts=3, hidden=8, max_tokens_per_rank=9),
    "nobody has a token": case([0, 0], 1, n_experts=2, hidden=8, max_tokens_per_rank=2),
    "hot expert": case([12, 9], 1, n_experts=8, hidden=40, max_tokens_per_rank=12, hot=5),
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
    "a shared expert shared by twice as many ranks": case(
        [3, 3], skip_a2a=True, fused_shared_expert=True, allreduce_world_size=4
    ),
    "a shared expert that every rank has whole": case(
        [3, 3], skip_a2a=True, fused_shared_expert=True, allreduce_world_size=1
    ),
    "nvfp4, shared expert": case([3, 2], hidden=64, token_format="nvfp4", fused_shared_expert=True),
    "many experts, wide rows": case([3, 1], 3, n_experts=80, hidden=1288, max_tokens_per_rank=3, alignment=64),
    "top 32": case([1, 2], 32, n_experts=34, hidden=8, max_tokens_per_rank=2),
    "fp32": case([5, 6], 3, combine_dtype="fp32"),
}
BY_PLAIN_KERNELS = {
    "top_k above 32": case([1, 1], 33, n_experts=34, hidden=8),
    "skip_a2a with use_shmem": case([4, 4], skip_a2a=True, use_shmem=True, p2p_world_size=1),
    "two p2p worlds": case([4, 3], use_shmem=True, p2p_world_size=1),
    "two p2p worlds of two": case([2, 1, 0, 2], n_experts=8, use_shmem=True, p2p_world_size=2),
    "more tokens than a warp has lanes": case([70, 66], n_experts=8, hidden=8, max_tokens_per_rank=70, hot=5),
}


@pytest.mark.by_day(18)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize(
    "name, kernels", [(n, k) for k in WORLDS for n in CASES] + [(n, "plain") for n in BY_PLAIN_KERNELS]
)
def test_rounds_are_exact_and_leave_the_memory_as_it_was(name, kernels, fused):
    cfg, tokens, options = (CASES | BY_PLAIN_KERNELS)[name]
    simulation = dict(seed=1, racecheck=True, stale=kernels == "plain")
    world, rng = WORLDS[kernels](cfg, fused=fused, **simulation), np.random.default_rng(7)
    for _ in range(2):
        run_round(world, rng, tokens, **options)


@pytest.mark.parametrize("fused, shared", [(True, False), (False, True)])
def test_rows_behind_padding_are_staged_inside_send_buf(fused, shared):
    """combine's send_buf has a place for every received row and none for padding or the shared expert's rows."""
    sizes = dict(hidden=128, max_tokens_per_rank=1, token_format="fp8_blockwise", combine_dtype="fp16", use_shmem=True)
    cfg, tokens, _ = case([1, 1], 4, **sizes, p2p_world_size=1, fused_shared_expert=shared)
    run_round(PlainWorld(cfg, fused=fused, seed=1, racecheck=True), np.random.default_rng(0), tokens)
