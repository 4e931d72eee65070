"""Large batches: if blocks have several batches of tokens to send, all of them send first, then all receive."""

import numpy as np
import pytest
from kernel_world import KernelWorld
from test_dispatch_combine_rounds import CASES, run_round

from epmoe.kernels import LaunchConfig
from epmoe_ref.config import EPConfig

IN_TURNS = dict(batch_messages=4, turns_from=1)  # a batch is a token or two


@pytest.mark.by_day
@pytest.mark.parametrize("name", ["plain", "empty rank, three ranks", "nobody has a token", "shared expert", "top 32"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_rounds_are_exact(name, fused):
    case = CASES[name]
    world = KernelWorld(
        EPConfig(**case["cfg"]),
        fused=fused,
        launch=LaunchConfig(n_sms=3, num_threads=64),
        seed=1,
        racecheck=True,
        stale=True,
        tuning=IN_TURNS,
    )
    run_round(world, case, np.random.default_rng(8))


@pytest.mark.by_day
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(
    "n_sms, num_threads",
    [pytest.param(3, 32, id="fewer threads than experts"), pytest.param(6, 96, id="beside few tokens")],
)
def test_other_ways_are_right_beside_it(fused, n_sms, num_threads):
    cfg = EPConfig(n_ranks=2, n_experts=34, top_k=4, hidden=40, max_tokens_per_rank=10)
    launch = LaunchConfig(n_sms=n_sms, num_threads=num_threads)
    world = KernelWorld(cfg, fused=fused, launch=launch, seed=2, racecheck=True, tuning=IN_TURNS)
    run_round(world, dict(tokens=[10, 2]), np.random.default_rng(5))
