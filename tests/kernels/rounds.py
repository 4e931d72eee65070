"""A round of the kernels, compared with the reference to the bit, and the after-conditions of every word."""

import numpy as np
from ml_dtypes import bfloat16

import epmoe_ref
from epmoe.check import compare_dispatched
from epmoe.kernels.plain.arguments import DTYPES
from epmoe.layout import MAX_FINITE
from epmoe_ref.dispatch import shared_expert_share

COUNTERS = ("reserved", "finished", "rank_completion", "D", "E", "F", "G", "combine_ready")
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


def normal(rng, *shape, dtype=bfloat16):
    return rng.normal(size=shape).astype(dtype)


def expert_outputs(world, rng, dispatched):
    """Of capacity: rows that differ everywhere; NaN in those that nobody may read."""
    cfg, outputs = world.cfg, []
    for rank, d in enumerate(dispatched):
        rows = normal(rng, world.capacity, cfg.hidden, dtype=DTYPES[cfg.combine_dtype])
        rows[len(d.src_info) :] = np.nan
        rows[: len(d.src_info)][padding_rows(cfg, rank, d)] = np.nan
        outputs.append(rows)
    return outputs


def run_round(world, rng, counts, *, hot=None, input_dtype=bfloat16, input_scale=1.0):
    """Dispatch, experts that tell rows apart, combine; everything is compared. counts: tokens of each rank."""
    cfg = world.cfg
    ids = routing(cfg, rng, counts, hot)
    tokens = [normal(rng, len(i), cfg.hidden, dtype=input_dtype) for i in ids]
    weights = [normal(rng, *i.shape, dtype=np.float32) for i in ids]
    for w, i in zip(weights, ids):
        w[i < 0] = np.nan  # the weight of an empty slot must not matter
    if cfg.skip_a2a:
        tokens, weights = [tokens[0]] * cfg.n_ranks, [weights[0]] * cfg.n_ranks
    got = world.dispatch(tokens, ids, input_scale=input_scale)
    wanted = epmoe_ref.dispatch(cfg, tokens, ids, input_scale=input_scale)
    for rank in range(cfg.n_ranks):
        assert_dispatched(cfg, rank, got[rank], wanted[rank])
        assert_after_dispatch(world, rank, got[rank])
    outputs = expert_outputs(world, rng, got)
    combined = world.combine(outputs, got, [(w,) for w in weights] if world.is_reduced else None)
    right = epmoe_ref.combine(cfg, outputs, got, router_weights=weights if world.is_reduced else None)
    for rank in range(cfg.n_ranks):
        assert_same(combined[rank], right[rank], f"combined of rank {rank}")
    assert_after_combine(world)


def assert_same(got, wanted, what):
    """Bit for bit."""
    got, wanted = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
    differ = (got.view(np.uint8) != wanted.view(np.uint8)).reshape(*got.shape, -1).any(-1) if got.size else []
    for place in map(tuple, np.argwhere(differ)[:1]):
        raise AssertionError(f"{what} differs at {place}: {got[place]}, {wanted[place]} is right")


def assert_dispatched(cfg, rank, got, wanted):
    """Bit for bit, but for what the protocol leaves free."""
    differences = compare_dispatched(cfg, rank, got, wanted)
    assert not differences, differences[0]


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
    """All is put back but region A, which says what combine has to send."""
    cfg = world.cfg
    for name in (*COUNTERS, "status"):
        assert not world.read(rank, name).any(), f"{name} of rank {rank} after dispatch: {world.read(rank, name)}"
    assert (world.read(rank, "dispatch_recv_count") == MAX_FINITE).all(), f"recv_count of rank {rank}"
    front = cfg.n_groups - cfg.n_local_experts
    ends = d.row_offsets[front:-1].astype(np.int64)[:, None] + np.cumsum(d.recv_count, axis=1)
    a = world.read(rank, "A")
    assert (a[..., 0] == READY + ends).all() and (a[..., 1] == d.recv_count).all(), f"A of rank {rank}: {a}"


def assert_after_combine(world):
    """On all ranks the memory is as before the first round."""
    for rank in range(world.cfg.n_ranks):
        for name in (*COUNTERS, "A"):
            assert not world.read(rank, name).any(), f"{name} of rank {rank} after combine: {world.read(rank, name)}"
        for name in ("dispatch_recv_count", "combine_recv_count"):
            assert (world.read(rank, name) == MAX_FINITE).all(), f"{name} of rank {rank} after combine"
