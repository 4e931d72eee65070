"""The small world that the page draws, and epmoe_ref's results for it; of a large world, a slice and its totals."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

import epmoe_ref
from epmoe.routing_report.counts import count
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

RANKS, LOCAL, TOKENS, TOP_K = 4, 3, 4, 3  # the most that fits on the stage
COLUMNS = 4


class Drawn(NamedTuple):
    """world: the world on the stage, in the form of the page's model. whole: totals of a larger routing, or None.

    notes: sentences about omitted parts.
    """

    world: dict
    whole: dict | None
    notes: list


def drawn(cfg, routed):
    """A routing as the page shows it: complete if it fits on the stage, else a slice of it and its totals."""
    if not any((ids[:3] >= 0).any() for ids in routed.topk_ids[:3]):
        raise EPValueError(
            "no token to draw has an expert: the first tokens of the first ranks have only -1 in topk_ids"
        )
    sizes = cfg.n_ranks, cfg.n_local_experts, max(routed.num_tokens), cfg.top_k
    if all(size <= most for size, most in zip(sizes, (RANKS, LOCAL, TOKENS, TOP_K))):
        ids, weights = [a.tolist() for a in routed.topk_ids], [a.tolist() for a in routed.topk_weights]
        return Drawn(_world(cfg.n_ranks, cfg.n_local_experts, cfg.top_k, ids, weights, routed.x), None, [])
    world, notes = _slice(cfg, routed)
    return Drawn(world, totals(cfg, routed.topk_ids), notes)


def _world(ranks, local, top_k, ids, weights, x):
    x = [np.asarray(of_rank[:, :COLUMNS], np.float32).tolist() for of_rank in x]
    return {"ranks": ranks, "local": local, "topK": top_k, "ids": ids, "weights": weights, "x": x}


def _slice(cfg, routed):
    """The first tokens of the first ranks, and for each rank the experts that these tokens choose most often."""
    ranks, local, top_k = min(cfg.n_ranks, 3), min(cfg.n_local_experts, 2), min(cfg.top_k, 2)
    picked = [ids[:3] for ids in routed.topk_ids[:ranks]]
    wanted = np.bincount(np.concatenate([p[p >= 0] for p in picked]), minlength=cfg.n_experts)
    shown = {}  # global expert -> its number in the slice
    for rank in range(ranks):
        mine = range(rank * cfg.n_local_experts, (rank + 1) * cfg.n_local_experts)
        for le, e in enumerate(sorted(sorted(mine, key=lambda e: -wanted[e])[:local])):
            shown[e] = rank * local + le
    ids, weights = [], []
    for rank, some in enumerate(picked):
        new, w = np.full((len(some), top_k), -1, int), np.zeros((len(some), top_k), np.float32)
        for t, row in enumerate(some):
            kept = [k for k, e in enumerate(row) if int(e) in shown][:top_k]
            new[t, : len(kept)] = [shown[int(row[k])] for k in kept]
            w[t, : len(kept)] = np.asarray(routed.topk_weights[rank])[t, kept]
        ids.append(new.tolist())
        weights.append(w.tolist())
    world = _world(ranks, local, top_k, ids, weights, [x[:3] for x in routed.x[:ranks]])
    names = ", ".join(f"e{n} is expert {e}" for e, n in shown.items())
    notes = [
        f"{cfg.n_ranks} ranks x {cfg.n_local_experts} experts x {max(routed.num_tokens)} tokens, top-{cfg.top_k}, are "
        f"too many to draw (at most {RANKS} x {LOCAL} x {TOKENS}, top-{TOP_K}). The stage shows a slice: the first "
        f"{max(map(len, picked))} tokens of {ranks} ranks, and up to {top_k} choices each among {len(shown)} experts "
        f"({names}). The matrices and loads show the whole routing."
    ]
    return world, notes


def totals(cfg, topk_ids):
    """Pairs and rows [src_rank][dst_rank], and each expert's load, for matrices and floors."""
    step = count(topk_ids, cfg.n_experts)
    return {
        "pairs": step.pairs.tolist(),
        "rows": step.rows.tolist(),
        "load": step.by_expert.tolist(),
        "local": cfg.n_local_experts,
    }


def expert_outputs(world, dispatched):
    """The outputs of the page's experts: expert e multiplies rows by e + 1."""
    made = []
    for rank, d in enumerate(dispatched):
        scale = np.repeat(np.arange(world["local"]) + rank * world["local"] + 1, np.diff(d.row_offsets.astype(int)))
        made.append((np.asarray(d.output_tokens, np.float32) * scale[:, None]).astype(ml_dtypes.bfloat16))
    return made


def reference(world):
    """epmoe_ref's arrays of a world: lists over ranks. Tokens have 8 numbers, the world's and then zeros."""
    tokens = [np.zeros((len(x), 8), ml_dtypes.bfloat16) for x in world["x"]]
    for made, x in zip(tokens, world["x"]):
        if x:
            made[:, : len(x[0])] = np.asarray(x, np.float32)
    ids = [np.asarray(i, np.int32).reshape(-1, world["topK"]) for i in world["ids"]]
    weights = [np.asarray(w, np.float32).reshape(-1, world["topK"]) for w in world["weights"]]
    cfg = EPConfig(world["ranks"], world["ranks"] * world["local"], world["topK"], 8, max(1, *map(len, tokens)))
    dispatched = [epmoe_ref.canonical(d) for d in epmoe_ref.dispatch(cfg, tokens, ids)]
    combined = epmoe_ref.combine(cfg, expert_outputs(world, dispatched), dispatched, router_weights=weights)
    columns = len(world["x"][0][0]) if world["x"][0] else COLUMNS
    return {
        "recv_count": [d.recv_count.tolist() for d in dispatched],
        "row_offsets": [d.row_offsets.tolist() for d in dispatched],
        "src_info": [d.src_info.tolist() for d in dispatched],
        "output_tokens": [np.asarray(d.output_tokens[:, :columns], np.float32).tolist() for d in dispatched],
        "combined": [np.asarray(c[:, :columns], np.float32).tolist() for c in combined],
    } | totals(cfg, ids)
