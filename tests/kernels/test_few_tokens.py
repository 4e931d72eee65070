"""Few tokens and enough blocks: a block for each destination, beside the way that many tokens take."""

import numpy as np
import pytest
from epmoe.kernels import LaunchConfig, few_tokens
from epmoe_ref.config import EPConfig
from kernel_world import KernelWorld
from test_dispatch_combine_rounds import CASES, run_round

SMALL = dict(n_ranks=2, n_experts=6, top_k=4, hidden=16, max_tokens_per_rank=6)
ENOUGH = LaunchConfig(n_sms=6, num_threads=64)


@pytest.mark.parametrize("name", ["empty rank, three ranks", "nobody has a token", "one rank", "top 32",
                                  "shared expert", "fp8 rows padded to 4", "nvfp4"])
def test_rounds_are_exact(name):
    case = CASES[name]
    world = KernelWorld(EPConfig(**case["cfg"]), fused=True, launch=ENOUGH, seed=1, racecheck=True)
    rng = np.random.default_rng(7)
    for _ in range(2):
        run_round(world, case, rng)


@pytest.mark.parametrize("seed, stale", [(None, False), (1, False), (2, True), (3, True)])
def test_beside_ranks_with_many_tokens(seed, stale, monkeypatch):
    """Of the two ranks one or the other has too many tokens, in turn."""
    monkeypatch.setattr(few_tokens, "MOST_TOKENS", 3)
    cfg = EPConfig(**SMALL | dict(hidden=24))      # compiled for this test
    world = KernelWorld(cfg, fused=True, launch=ENOUGH, seed=seed, racecheck=True, stale=stale)
    for tokens in ([3, 6], [4, 2], [1, 0]):
        run_round(world, dict(tokens=tokens), np.random.default_rng(5))


def test_counters_are_not_used(monkeypatch):
    """What a block does alone needs neither slots in `reserved` nor pieces in `finished`: their words stay unread."""
    def unused(*args):
        raise AssertionError("counted in device memory")

    monkeypatch.setattr("epmoe.kernels.senders.atomic_add_relaxed_gpu_i32", unused)
    monkeypatch.setattr("epmoe.kernels.signaller.atomic_add_acq_rel_gpu_i32", unused)
    world = KernelWorld(EPConfig(**SMALL), fused=True, launch=ENOUGH, seed=0)
    run_round(world, dict(tokens=[6, 5]), np.random.default_rng(5))
