"""epmoe_ref.dispatch and combine equal one loop over tokens and k, to the bit, in random worlds.

EPMOE_WORLDS=10000 runs that many worlds instead of the sample; EPMOE_FIRST_WORLD starts at another seed.
"""

import os

import pytest
import record_model
from exact_formats import FACTS
from random_worlds import Limits, random_world
from runs import reference_difference

WORLDS = int(os.environ.get("EPMOE_WORLDS", "160"))
FIRST = int(os.environ.get("EPMOE_FIRST_WORLD", "0"))
BATCHES = 10


@pytest.mark.by_day(2)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_worlds(batch):
    for seed in range(FIRST + batch, FIRST + WORLDS, BATCHES):
        world = random_world(seed)
        difference = reference_difference(world, weights_as_function=seed % 3 == 0)
        assert difference is None, difference


@pytest.mark.parametrize("token_format", FACTS)
@pytest.mark.parametrize("fused_shared_expert", [False, True])
@pytest.mark.parametrize("skip_a2a", [False, True])
def test_every_format_with_every_routing_option(token_format, fused_shared_expert, skip_a2a):
    for preshuffle in {False, token_format == "mxfp4_rows"}:
        world = random_world(
            1000,
            token_format=token_format,
            fused_shared_expert=fused_shared_expert,
            skip_a2a=skip_a2a,
            fuse_a_scale_preshuffle=preshuffle,
        )
        difference = reference_difference(world)
        assert difference is None, difference


@pytest.mark.by_day(2)
@pytest.mark.parametrize("token_format", ["mxfp4_rows", *(name for name, facts in FACTS.items() if facts.tiles)])
def test_groups_of_several_scale_tiles_or_blocks_of_a_slot(token_format):
    """Groups of more and of fewer than 128 rows, so that scales_offset differs from the number of tiles before."""
    limits = Limits(ranks=3, local_experts=3, top_k=2, hidden=1, tokens=150, large_share=1.0)
    groups_far_out = 0
    for seed in range(4000, 4002):
        world = random_world(
            seed,
            limits,
            token_format=token_format,
            fuse_a_scale_preshuffle=token_format == "mxfp4_rows",
            n_ranks=3,
            n_local_experts=3,
            top_k=1 + seed % 2,
            skip_a2a=False,
            weights="none",
        )
        difference = reference_difference(world)
        assert difference is None, difference
        groups_far_out += sum(
            offset >= 128 for received in record_model.dispatch(world) for offset in received.row_offsets[1:-1]
        )
    assert groups_far_out > 3 or token_format == "mxfp4_rows"
