"""ExpertParallel over LocalWorld gives what one loop over tokens and slots gives, split and fused, to the bit.

EPMOE_SIM_WORLDS=1000 runs that many worlds instead of the sample; EPMOE_FIRST_WORLD starts at another seed.
"""

import os

import pytest

from exact_formats import FACTS
from random_worlds import Limits, random_world
from simulator_runs import simulator_difference

WORLDS = int(os.environ.get("EPMOE_SIM_WORLDS", "24"))
FIRST = int(os.environ.get("EPMOE_FIRST_WORLD", "0"))
BATCHES = 8
LIMITS = Limits(local_experts=4, top_k=4, hidden=256, tokens=12, large_share=0, work=1200)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_random_worlds(batch, fused):
    for seed in range(FIRST + batch, FIRST + WORLDS, BATCHES):
        world = random_world(10_000 + seed, LIMITS)
        difference = simulator_difference(
            world, fused=fused, seed=seed, weights_as_function=world.weights is not None and seed % 3 == 0,
            rounds=1 + (seed % 4 == 0))
        assert difference is None, difference


@pytest.mark.parametrize("token_format", FACTS)
def test_more_rows_than_a_scale_tile(token_format):
    """An expert gets more than 128 rows: its scales need a second tile, its rows a second block of work."""
    limits = Limits(hidden=1, tokens=80, large_share=1.0)
    worlds = (random_world(seed, limits, token_format=token_format, n_ranks=2, n_local_experts=1, top_k=1,
                           skip_a2a=False, fuse_a_scale_preshuffle=False) for seed in range(500))
    world = next(w for w in worlds if sum(len(t) for t in w.tokens) > 140)
    world.topk_ids = [[[0] for _ in ids] for ids in world.topk_ids]
    difference = simulator_difference(world, fused=True, seed=None)
    assert difference is None, difference
