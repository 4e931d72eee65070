"""epmoe_ref.dispatch and combine equal one loop over tokens and k, to the bit, in random worlds.

EPMOE_WORLDS=10000 runs that many worlds instead of the sample; EPMOE_FIRST_WORLD starts at another seed.
"""

import os

import api_arrays
import numpy as np
import pytest
import record_model
from differences import dispatch_difference
from exact_formats import FACTS
from random_worlds import Limits, random_world
from reference_runs import reference_difference

WORLDS = int(os.environ.get("EPMOE_WORLDS", "160"))
FIRST = int(os.environ.get("EPMOE_FIRST_WORLD", "0"))
BATCHES = 10


@pytest.mark.by_day(4)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_worlds(batch):
    for seed in range(FIRST + batch, FIRST + WORLDS, BATCHES):
        world = random_world(seed)
        difference = reference_difference(
            world, weights_as_function=world.weights is not None and seed % 3 == 0
        )
        assert difference is None, difference


@pytest.mark.parametrize("token_format", FACTS)
@pytest.mark.parametrize("fused_shared_expert", [False, True])
@pytest.mark.parametrize("skip_a2a", [False, True])
def test_every_format_with_every_routing_option(token_format, fused_shared_expert, skip_a2a):
    for seed in (1000, 1001):
        world = random_world(
            seed,
            token_format=token_format,
            fused_shared_expert=fused_shared_expert,
            skip_a2a=skip_a2a,
            fuse_a_scale_preshuffle=token_format == "mxfp4_rows" and seed % 2 == 0,
        )
        difference = reference_difference(world)
        assert difference is None, difference


@pytest.mark.parametrize("token_format", FACTS)
def test_canonical_undoes_any_order_inside_a_segment(token_format):
    """Rows shuffled inside each (expert, src_rank) segment come back in (token, k) order."""
    import dataclasses

    import epmoe_ref

    shuffled_rows = 0
    for seed in range(2000, 2012):
        world = random_world(seed, token_format=token_format)
        received = record_model.dispatch(world)
        cfg = api_arrays.config(world, epmoe_ref.EPConfig)
        dispatched = epmoe_ref.dispatch(
            cfg,
            api_arrays.input_tokens(world),
            api_arrays.topk_ids(world),
            input_scale=api_arrays.input_scale(world),
        )
        rng = np.random.default_rng(seed)
        for rank in range(world.n_ranks):
            order = shuffle_inside_segments(rng, received[rank])
            shuffled_rows += sum(order != np.arange(len(order)))
            messy = record_model.Received(
                **{
                    f.name: getattr(received[rank], f.name)
                    for f in dataclasses.fields(received[rank])
                }
            )
            messy.rows = [
                dataclasses.replace(received[rank].rows[old], row_in_group=row.row_in_group)
                for old, row in zip(order, received[rank].rows)
            ]
            record_model.place_scales(world, messy)
            mixed = dataclasses.replace(
                dispatched[rank],
                output_tokens=dispatched[rank].output_tokens[order],
                src_info=dispatched[rank].src_info[order],
                output_scales=with_bytes(dispatched[rank].output_scales, messy),
            )
            assert (
                dispatch_difference(world, rank, received[rank], mixed, padding_is_zero=True)
                is None
            )
            tidy = epmoe_ref.canonical(mixed)
            for name in (
                "output_tokens",
                "output_scales",
                "src_info",
                "row_offsets",
                "scales_offset",
            ):
                before, after = getattr(dispatched[rank], name), getattr(tidy, name)
                assert (before is None) == (after is None)
                if before is not None:
                    assert (
                        api_arrays.bytes_of(before).tobytes()
                        == api_arrays.bytes_of(after).tobytes()
                    ), (seed, name)
    assert shuffled_rows > 20


def shuffle_inside_segments(rng, received):
    """old row for each new row."""
    order = np.arange(len(received.rows))
    segments = {}
    for row, record in enumerate(received.rows):
        if not isinstance(record.src_rank, str):
            segments.setdefault((record.group, record.src_rank), []).append(row)
    for rows in segments.values():
        order[rows] = rng.permutation(rows)
    return order


def with_bytes(like, received):
    """The scale array with the model's bytes at their new places."""
    if like is None:
        return None
    flat = np.zeros(received.scale_size, np.uint8)
    for at, (value, _) in received.scale_bytes.items():
        flat[at] = value
    return flat.view(like.dtype).reshape(like.shape)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("token_format", [name for name, facts in FACTS.items() if facts.tiles])
def test_groups_of_several_scale_tiles(token_format):
    """Groups of more and of fewer than 128 rows, so that scales_offset differs from the number of tiles before."""
    limits = Limits(ranks=3, local_experts=3, top_k=2, hidden=1, tokens=150, large_share=1.0)
    groups_far_out = 0
    for seed in range(4000, 4004):
        world = random_world(
            seed,
            limits,
            token_format=token_format,
            fuse_a_scale_preshuffle=False,
            n_ranks=3,
            n_local_experts=3,
            top_k=1 + seed % 2,
            skip_a2a=False,
            weights="none",
        )
        difference = reference_difference(world)
        assert difference is None, difference
        groups_far_out += sum(
            offset >= 128
            for received in record_model.dispatch(world)
            for offset in received.row_offsets[1:-1]
        )
    assert groups_far_out > 3
