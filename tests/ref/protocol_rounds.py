"""Rounds through the state machine, ranks stepping in random legal orders."""

import numpy as np

from epmoe_ref import segments, shared_expert_share
from epmoe_ref.combine import COMBINE_DTYPES
from epmoe_ref.protocol import World


def tables(cfg, world, seed):
    """The experts' outputs, over ranks: one row for each (token, k), and one for each token (shared expert)."""
    rng = np.random.default_rng(seed)
    dtype = COMBINE_DTYPES[cfg.combine_dtype]
    return [
        (
            rng.standard_normal((len(ids), cfg.top_k, cfg.hidden)).astype(dtype),
            rng.standard_normal((len(ids), cfg.hidden)).astype(dtype),
        )
        for ids in world.topk_ids
    ]


def expert_outputs(cfg, d, rank, returned):
    """Rows of expert output for any order of rows: each from the tables by its source; NaN in padding rows."""
    rows = np.full((int(d.row_offsets[-1]), cfg.hidden), np.nan, COMBINE_DTYPES[cfg.combine_dtype])
    if cfg.fused_shared_expert:
        shared = returned[rank][1][: shared_expert_share(cfg, rank, d.num_tokens)[1]]
        rows[: len(shared)] = shared
    for segment in segments(d):
        token, slot = d.src_info[segment.start : segment.end].T
        rows[segment.start : segment.end] = returned[rank if cfg.skip_a2a else segment.src_rank][0][token, slot]
    return rows


def run(cfg, rounds, seed, *, options=None, scales=None, after_step=lambda world, rank: None, fill=0):
    """Run rounds (each a strategies.World) without a reset; ranks that need not wait step in random order.

    options: (world, rank) -> the options of combine_wait; None: the world's router weights. scales: input_scale of each
    rank, or None. Returns a list over rounds of (list of Dispatched, list of results), and the rounds' tables.
    after_step is called with the state machine's world and the rank that has stepped.
    """
    rng, machine = np.random.default_rng(seed), World(cfg, fill)
    returned = [tables(cfg, world, seed + i) for i, world in enumerate(rounds)]
    results = [([None] * cfg.n_ranks, [None] * cfg.n_ranks) for _ in rounds]
    at = [0] * cfg.n_ranks
    while True:
        able = [rank for rank in machine.ready() if at[rank] < len(rounds)]
        if not able:
            break
        rank = int(rng.choice(able))
        world, (dispatched, combined) = rounds[at[rank]], results[at[rank]]
        step = machine.ranks[rank].next_step
        if step == "dispatch_async":
            machine.dispatch_async(
                rank,
                world.input_tokens[rank],
                world.topk_ids[rank],
                input_scale=scales[rank] if scales else 1.0,
                claims=int(rng.integers(2**31)),
            )
        elif step == "dispatch_wait":
            dispatched[rank] = machine.dispatch_wait(rank)
        elif step == "combine_async":
            d = dispatched[rank]
            machine.combine_async(rank, expert_outputs(cfg, d, rank, returned[at[rank]]), d.src_info)
        else:
            given = options(world, rank) if options else dict(router_weights=world.router_weights[rank])
            combined[rank] = machine.combine_wait(rank, **given)
            at[rank] += 1
        after_step(machine, rank)
    assert at == [len(rounds)] * cfg.n_ranks, "ranks that step in legal orders never wait for ever"
    return results, returned
