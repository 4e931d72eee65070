"""The protocol under many schedules, and in shapes that take the branches which small worlds do not."""

import numpy as np
import pytest
from kernel_world import KernelWorld
from test_dispatch_combine_rounds import run_round

from epmoe.kernels import LaunchConfig
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

SMALL = dict(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("seed", [None, 11, 12, 13, 14])
def test_any_schedule_gives_the_same_answer(seed, fused):
    world = KernelWorld(EPConfig(**SMALL), fused=fused, seed=seed, racecheck=True)
    rng = np.random.default_rng(1)
    for tokens in ([4, 3], [0, 4]):
        run_round(world, dict(tokens=tokens), rng)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seed", [21, 22])
def test_stale_values_that_the_memory_model_permits_change_nothing(seed):
    for fused in (False, True):
        world = KernelWorld(EPConfig(**SMALL), fused=fused, seed=seed, racecheck=True, stale=True)
        rng = np.random.default_rng(2)
        for tokens in ([4, 3], [1, 4]):
            run_round(world, dict(tokens=tokens), rng)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize(
    "options",
    [
        dict(token_format="nvfp4", hidden=64, fused_shared_expert=True),
        dict(token_format="fp8_blockwise", hidden=128, combine_dtype="fp32"),
        dict(),
    ],
    ids=["tiles and shared expert", "padded rows", "bf16"],
)
def test_more_experts_than_one_look_takes(options, fused):
    """Shared memory holds a window of the experts; here the windows are tiny, so that several are needed."""
    tuning = dict(counted_experts=3, counts=5, returned_segments=4)
    sizes = dict(n_ranks=2, n_experts=14, top_k=3, hidden=16, max_tokens_per_rank=7, alignment=32) | options
    world = KernelWorld(EPConfig(**sizes), fused=fused, seed=3, racecheck=True, tuning=tuning)
    run_round(world, dict(tokens=[7, 5]), np.random.default_rng(3))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_tiles_of_several_rows(fused):
    """Many rows a warp: claims of whole tiles, the last of them short."""
    cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8, max_tokens_per_rank=33)
    world = KernelWorld(cfg, fused=fused, seed=5, racecheck=True)
    run_round(world, dict(tokens=[33, 17]), np.random.default_rng(4))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("launch", [LaunchConfig(2, 32), LaunchConfig(5, 32), LaunchConfig(2, 128)])
def test_any_grid(launch):
    for fused in (False, True):
        world = KernelWorld(EPConfig(**SMALL), fused=fused, launch=launch, seed=6, racecheck=True)
        run_round(world, dict(tokens=[4, 3]), np.random.default_rng(5))


def test_more_blocks_than_combine_wait_has_flags():
    """The kernels need no ready flag a block: a grid beyond 2n blocks writes nothing behind ep_counters."""
    cfg = EPConfig(n_ranks=1, n_experts=1, top_k=1, hidden=8, max_tokens_per_rank=4)
    for fused in (False, True):
        world = KernelWorld(cfg, fused=fused, launch=LaunchConfig(7, 32), seed=7, racecheck=True)
        run_round(world, dict(tokens=[4]), np.random.default_rng(6))


def test_launches_that_cannot_work_are_refused():
    with pytest.raises(EPValueError, match="n_sms=1 must be at least 2"):
        LaunchConfig(n_sms=1)
    for threads in (16, 48, 2048):
        with pytest.raises(EPValueError, match=f"num_threads={threads} must be a multiple of 32"):
            LaunchConfig(num_threads=threads)
    world = KernelWorld(EPConfig(**SMALL))
    with pytest.raises(EPValueError, match="5 tokens are more than max_tokens_per_rank=4"):
        world.dispatch([np.zeros((5, 16), np.uint16)] * 2, [np.zeros((5, 2), int)] * 2)
