"""A round of the plain kernels, compared with the reference to the bit, and the after-conditions of every word."""

import numpy as np
from plain_world import BF16, assert_same

import epmoe_ref
from epmoe.kernels.plain.arguments import DTYPES, capacity
from epmoe.layout import MAX_FINITE
from epmoe_ref.canonical import canonical
from epmoe_ref.dispatch import shared_expert_share

ZERO_AFTER_DISPATCH = ("reserved", "finished", "rank_completion", "D", "E", "F", "G")
ZERO_AFTER_COMBINE = ("A", "reserved", "finished", "rank_completion", "combine_ready")
READY = 1024


def routing(cfg, rng, counts, hot=None):
    """Distinct ids a token, some slots -1, perhaps a hot expert; the same for all ranks under skip_a2a."""
    ids = []
    for n in counts:
        rows = np.argsort(rng.random((n, cfg.n_experts)), axis=1)[:, : cfg.top_k].astype(np.int32)
        if hot is not None and n:
            rows[:, 0] = hot
            rows[:, 1:][rows[:, 1:] == hot] = -1
        rows[rng.random(rows.shape) < 0.15] = -1
        ids.append(rows)
    return [ids[0]] * cfg.n_ranks if cfg.skip_a2a else ids


def run_round(world, rng, counts, *, hot=None, input_dtype=BF16, input_scale=None):
    """Dispatch, experts that tell rows apart, combine; everything is compared."""
    cfg = world.cfg
    ids = routing(cfg, rng, counts, hot)
    tokens = [rng.normal(size=(len(i), cfg.hidden)).astype(input_dtype) for i in ids]
    if cfg.skip_a2a:
        tokens = [tokens[0]] * cfg.n_ranks
    options = {} if input_scale is None else dict(input_scales_args=(input_scale,))
    got = world.dispatch(tokens, ids, **options)
    rounded = [x.astype(BF16) for x in tokens]
    wanted = epmoe_ref.dispatch(cfg, rounded, ids, input_scale=1.0 if input_scale is None else input_scale)
    for rank in range(cfg.n_ranks):
        assert_dispatched(cfg, rank, got[rank], wanted[rank])
        assert_after_dispatch(world, rank, got[rank])
    outputs = [rng.normal(size=(capacity(cfg), cfg.hidden)).astype(DTYPES[cfg.combine_dtype]) for _ in ids]
    weights = [rng.normal(size=(len(i), cfg.top_k)).astype(np.float32) for i in ids]
    combined = world.combine(outputs, got, [(w,) for w in weights] if world.reduced else None)
    right = epmoe_ref.combine(cfg, outputs, got, router_weights=weights if world.reduced else None)
    for rank in range(cfg.n_ranks):
        assert_same(combined[rank], right[rank], f"combined of rank {rank}")
        assert_after_combine(world, rank)


def assert_dispatched(cfg, rank, got, wanted):
    got, wanted = canonical(got), canonical(wanted)
    for name in ("row_offsets", "expert_ids", "src_info", "recv_count", "topk_ids", "scales_offset"):
        if getattr(wanted, name) is not None:
            assert_same(getattr(got, name), getattr(wanted, name), f"{name} of rank {rank}")
    padding = padding_rows(cfg, rank, got)
    for name in ("output_tokens", "output_scales"):
        g, w = getattr(got, name), getattr(wanted, name)
        if g is None:
            continue
        if name == "output_tokens" or cfg.token_format == "mxfp4_rows" and not cfg.fuse_a_scale_preshuffle:
            g, w = g[~padding], w[~padding]
        elif cfg.token_format == "fp8_blockwise":
            g, w = g[:, ~padding], w[:, ~padding]
        elif cfg.fuse_a_scale_preshuffle:
            used = w.view(np.uint8) != 0  # bytes of unused rows are unspecified
            g, w = np.where(used, g.view(np.uint8), 0), w.view(np.uint8)
        else:
            g = g[: len(w)]
        assert_same(g, w, f"{name} of rank {rank}")


def padding_rows(cfg, rank, d):
    """Which rows are padding: those past the rows of their group."""
    rows = np.zeros(len(d.src_info), bool)
    front = cfg.n_groups - cfg.n_local_experts
    for group in range(front, cfg.n_groups):
        end = int(d.row_offsets[group]) + int(d.recv_count[group - front].sum())
        rows[end : int(d.row_offsets[group + 1])] = True
    if front:
        rows[shared_expert_share(cfg, rank, d.num_tokens)[1] : int(d.row_offsets[1])] = True
    return rows


def assert_after_dispatch(world, rank, d):
    cfg = world.cfg
    for name in ZERO_AFTER_DISPATCH:
        assert not world.read(rank, name).any(), f"{name} of rank {rank} after dispatch: {world.read(rank, name)}"
    assert (world.read(rank, "dispatch_recv_count") == MAX_FINITE).all(), f"recv_count of rank {rank}"
    front = cfg.n_groups - cfg.n_local_experts
    ends = d.row_offsets[front:-1].astype(np.int64)[:, None] + np.cumsum(d.recv_count, axis=1)
    a = world.read(rank, "A")
    assert (a[..., 0] == READY + ends).all() and (a[..., 1] == d.recv_count).all(), f"A of rank {rank}: {a}"


def assert_after_combine(world, rank):
    for name in ZERO_AFTER_COMBINE:
        assert not world.read(rank, name).any(), f"{name} of rank {rank} after combine: {world.read(rank, name)}"
    assert (world.read(rank, "combine_recv_count") == MAX_FINITE).all(), f"recv_count of rank {rank}"
