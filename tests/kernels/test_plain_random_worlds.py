"""Random worlds and schedules of the plain kernels under the race detector; EPMOE_FUZZ=N makes it N of them."""

import os

import numpy as np
import pytest
from plain_world import PlainWorld
from rounds import run_round

from epmoe.kernels import LaunchConfig
from epmoe_ref.config import TOKEN_FORMATS, EPConfig

WORLDS = int(os.environ.get("EPMOE_FUZZ", "0") or 0) or 10


def random_world(seed):
    """(configuration, tokens of each rank, fused, launch) drawn from a seed."""
    rng = np.random.default_rng([seed, 21])
    n_ranks, local = int(rng.choice((1, 2, 2, 3, 4))), int(rng.choice((1, 2, 3, 5)))
    token_format = str(rng.choice(["bf16", "bf16", *TOKEN_FORMATS]))
    skip, shared = bool(rng.random() < 0.2), bool(rng.random() < 0.3)
    far = not skip and n_ranks % 2 == 0 and rng.random() < 0.3
    most = int(rng.choice((1, 3, 6)))
    cfg = EPConfig(
        n_ranks=n_ranks,
        n_experts=n_ranks * local,
        top_k=int(rng.integers(1, min(4, n_ranks * local) + 1)),
        hidden=TOKEN_FORMATS[token_format].hidden_multiple,
        max_tokens_per_rank=most,
        token_format=token_format,
        combine_dtype=str(rng.choice(("bf16", "fp16", "fp32"))),
        fused_shared_expert=shared,
        skip_a2a=skip,
        alignment=int(rng.choice((16, 16, 64))),
        use_shmem=bool(far),
        p2p_world_size=n_ranks // 2 if far else None,
    )
    launch = LaunchConfig(n_sms=int(rng.choice((2, 3, 5))), num_threads=int(rng.choice((32, 64, 96))))
    return (cfg, [int(n) for n in rng.integers(0, most + 1, n_ranks)], bool(rng.random() < 0.6), launch)


@pytest.mark.by_day(4)
@pytest.mark.parametrize("seed", range(WORLDS))
def test_a_random_world_is_exact(seed):
    cfg, counts, fused, launch = random_world(seed)
    world = PlainWorld(cfg, fused=fused, launch=launch, seed=seed, racecheck=True, stale=seed % 3 == 2)
    run_round(world, np.random.default_rng(seed), counts)


@pytest.mark.parametrize("fused, shared_expert", [(True, False), (False, True)])
def test_rows_behind_padding_are_staged_inside_send_buf(fused, shared_expert):
    """combine's send_buf has a place for every received row and none for padding or the shared expert's rows."""
    cfg = EPConfig(
        n_ranks=2,
        n_experts=4,
        top_k=4,
        hidden=128,
        max_tokens_per_rank=1,
        token_format="fp8_blockwise",
        combine_dtype="fp16",
        use_shmem=True,
        p2p_world_size=1,
        fused_shared_expert=shared_expert,
    )
    world = PlainWorld(cfg, fused=fused, seed=1, racecheck=True)
    run_round(world, np.random.default_rng(0), [1, 1])
