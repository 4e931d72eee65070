"""Combine deals its rows out in runs, however uneven the segments are; the result is exact."""

import numpy as np
import pytest
from kernel_world import KernelWorld
from test_dispatch_combine_rounds import run_round

from epmoe.kernels import LaunchConfig
from epmoe_ref.config import EPConfig

LAUNCH = LaunchConfig(n_sms=3, num_threads=224)  # 4 to 21 rows of a rank are on their way at once
CASES = {
    "two ranks": (dict(n_ranks=2, n_experts=6, top_k=2, hidden=264), [6, 5]),
    "three ranks, one without tokens": (dict(n_ranks=3, n_experts=6, top_k=2, hidden=16), [7, 0, 6]),
    "one rank": (dict(n_ranks=1, n_experts=4, top_k=2, hidden=16), [7]),
    "skip_a2a": (dict(n_ranks=2, n_experts=6, top_k=3, hidden=16, skip_a2a=True, p2p_world_size=1), [5, 5]),
    "padded rows": (dict(n_ranks=2, n_experts=6, top_k=2, hidden=128, token_format="fp8_blockwise"), [5, 6]),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_rounds_are_exact(name, fused):
    sizes, tokens = CASES[name]
    cfg = EPConfig(**sizes, max_tokens_per_rank=8)
    world = KernelWorld(cfg, fused=fused, launch=LAUNCH, seed=3, racecheck=True)
    run_round(world, dict(tokens=tokens), np.random.default_rng(5))
