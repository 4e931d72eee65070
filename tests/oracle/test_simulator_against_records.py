"""ExpertParallel over LocalWorld equals one loop over tokens and k, split and fused, to the bit.

EPMOE_SIM_WORLDS=1000 runs that many worlds instead of the sample, each several rounds; EPMOE_FIRST_WORLD starts at
another seed; EPMOE_SIM_LIMITS=full draws sizes up to 4 ranks, 16 experts a rank, top-8, hidden 512 and 40 tokens.
"""

import os
import random

import pytest
from random_worlds import Limits, next_round, random_world
from runs import simulator_difference

WORLDS = int(os.environ.get("EPMOE_SIM_WORLDS", "16"))
FIRST = int(os.environ.get("EPMOE_FIRST_WORLD", "0"))
BATCHES = 8
LIMITS = Limits(local_experts=4, top_k=4, hidden=256, tokens=12, large_share=0, work=800)
if os.environ.get("EPMOE_SIM_LIMITS") == "full":
    LIMITS = Limits(large_share=0.1)


def launch_of(draw):
    """A grid and a block size, from the smallest to odd ones."""
    from epmoe import LaunchConfig

    return draw.choice(
        (
            None,
            None,
            LaunchConfig(n_sms=2, num_threads=32),
            LaunchConfig(n_sms=5, num_threads=32),
            LaunchConfig(n_sms=2, num_threads=96),
            LaunchConfig(n_sms=4, num_threads=64),
        )
    )


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.by_day(3)
def test_random_worlds_round_after_round(batch):
    """Rounds of one configuration with other data each, split and fused mixed, under random schedules and grids."""
    for seed in range(FIRST + batch, FIRST + WORLDS, BATCHES):
        draw = random.Random(seed)
        worlds = [random_world(10_000 + seed, LIMITS)]
        worlds += [next_round(worlds[0], 1_000_000 + 10 * seed + i, LIMITS) for i in range(draw.choice((1, 1, 2)))]
        difference = simulator_difference(
            worlds,
            fused=[draw.random() < 0.5 for _ in worlds],
            seed=draw.choice((seed, seed, None)),
            weights_as_function=seed % 3 == 0,
            racecheck=seed % 4 == 1 or None,
            launch=launch_of(draw),
            mixed=seed % 5 == 2,
            kernels=draw.choice(("plain", "fast")),
        )
        assert difference is None, difference


@pytest.mark.parametrize("token_format", ["nvfp4", "fp8_blockwise", "mxfp4_rows"])
@pytest.mark.by_day(1)
def test_more_rows_than_a_scale_tile(token_format):
    """An expert gets more than 128 rows: its scales need a second tile, its rows a second block of work."""
    limits = Limits(hidden=1, tokens=80, large_share=1.0)
    worlds = (
        random_world(
            seed,
            limits,
            token_format=token_format,
            n_ranks=2,
            n_local_experts=1,
            top_k=1,
            skip_a2a=False,
            fuse_a_scale_preshuffle=False,
            weights="none",
        )
        for seed in range(500)
    )
    world = next(w for w in worlds if 128 < sum(len(t) for t in w.tokens) < 140)
    world.topk_ids = [[[0] for _ in ids] for ids in world.topk_ids]
    difference = simulator_difference(world, fused=True, seed=None)
    assert difference is None, difference
