"""Sends small batches by expert into windows at their ranks, before any rank has announced anything.

A token has its own place in a window, so no rank needs the number of other tokens. A rank's rows for itself are not
moved, or, if encoded, are in its own window. Probs go in words that name the call (window_probs.py), rows with a flag
for each part. window_expand.py stores them in experts' rows.
"""

from types import SimpleNamespace

from epmoe.device import (block_idx, device_fn, fence_acq_rel_sys, grid_dim, i32, lane_id, n_warps, prefetch, u32, u64,
                          warp_id)

from . import control, map_bits, senders, window_fp8, windows
from .row_copy import BATCH, VECTOR, copy_to_lanes, parts
from .routing import or_of_warp
from .waits import LINE


def n_parts_of(shape):
    """Parts of a row, each with a flag of its own."""
    return min(control.MOST_PARTS, max(1, -(-senders.bytes_of(shape) // (VECTOR * BATCH))))


def part_of_row(shape):
    """Device function (unit) -> (token, part), of numbers of parts of rows."""
    n_parts = n_parts_of(shape)

    @device_fn
    def part_of(unit):
        token = i32(u32(unit) // u32(n_parts))
        return token, i32(unit - token * n_parts)

    return part_of


@device_fn
def warps_of_rank():
    """(number of this warp among those of all blocks but the leader block, how many these are)"""
    blocks = i32(grid_dim() - 1)
    return i32(warp_id() * blocks + block_idx()), i32(n_warps() * blocks)


def make(shape, block, into, send_probs):
    """Device functions for one kernel, of all blocks but the leader block. into: its Windows; send_probs: of window_probs.py.

    prepare(num_tokens, x, routing_map) -> what a warp sends first, on its way. send(params, epoch, num_tokens, my_rank,
    x, routing_map, prepared): this warp's share of this rank's tokens. raise_flags(params, epoch, num_tokens, my_rank):
    behind that and a barrier; one warp says it for all of its block.
    """
    ranks, n_parts, row_bytes = shape.n_ranks, n_parts_of(shape), shape.row_bytes
    encodes, has_probs = shape.encode, shape.has_probs
    n_vectors, src_bytes = senders.vectors_of(shape), senders.bytes_of(shape)
    rows_at, raise_flag, a_vector = into.at[windows.X], into.raise_flag, src_bytes // n_vectors
    part_of, (_, part_span), look_at_ranks = part_of_row(shape), parts(n_vectors), map_bits.ranks_of_token(shape)
    load_given, store_given, copy_given = copy_to_lanes(read_only=True)
    if encodes:
        encode = window_fp8.encoder(shape)

    @device_fn
    def prepare(num_tokens, x, routing_map):
        lane, (unit, _), none, mask = i32(lane_id()), warps_of_rank(), u32(0), u32(0)
        batch = (none, none, none, none), (none, none, none, none), (none, none, none, none), (none, none, none, none)
        if unit < num_tokens * n_parts:
            token, part = part_of(unit)
            a, b = part_span(part, n_parts)
            mask = u32(look_at_ranks(routing_map, token, lane))
            if encodes:
                row, at = u64(x) + u64(token) * u64(src_bytes), i32(a_vector * a + LINE * lane)
                while at < a_vector * b:
                    prefetch(row + u64(at))
                    at = i32(at + 32 * LINE)
            elif a < b:
                batch = load_given(u64(x) + u64(token) * u64(src_bytes), a, b, lane)
        return mask, batch

    @device_fn
    def others(mask, my_rank):
        return u32(mask & ~u32(u32(1) << u32(my_rank)))

    @device_fn
    def send(params, epoch, num_tokens, my_rank, x, routing_map, prepared):
        lane, (unit, warps), is_first, rows = i32(lane_id()), warps_of_rank(), True, u64(0)
        seen, batch = prepared
        start, units = i32((my_rank + 1) & 31), i32(num_tokens * n_parts)
        if lane < ranks and unit < units:
            rows = u64(rows_at(params, epoch, lane, my_rank))
        while unit < units:
            token, part = part_of(unit)
            if not is_first:
                seen = u32(look_at_ranks(routing_map, token, lane))
            mask = u32(or_of_warp(seen))
            (a, b), to, theirs = part_span(part, n_parts), rows + u64(token) * u64(row_bytes), others(mask, my_rank)
            if encodes:
                encode(u64(x) + u64(token) * u64(src_bytes), to, mask, start, a, b, lane)
            else:
                if is_first:
                    store_given(batch, to, theirs, start, a, b, lane)
                    a = i32(min(i32(a + BATCH), b))
                copy_given(u64(x) + u64(token) * u64(src_bytes), to, theirs, start, a, b, lane)
            unit, is_first = i32(unit + warps), False
        if has_probs:
            unit = i32(unit - units)
            while unit < num_tokens * (ranks - 1):
                token = i32(u32(unit) // u32(max(ranks - 1, 1)))
                rank = i32(my_rank + 1 + unit - token * (ranks - 1))
                if rank >= ranks:
                    rank = i32(rank - ranks)
                send_probs(params, epoch, my_rank, routing_map, token, rank, lane)
                unit = i32(unit + warps)

    @device_fn
    def raise_flags(params, epoch, num_tokens, my_rank):
        blocks, units = i32(grid_dim() - 1), i32(num_tokens * n_parts)
        if warp_id() == n_warps() // 2 and block_idx() < units:    # whose own share is small, if it has any
            fence_acq_rel_sys()
            unit = i32(lane_id() * blocks + block_idx())
            while unit < units:
                (token, part), peer = part_of(unit), i32(1)
                while peer < ranks:             # also for ranks without the token, which never read it
                    rank = i32(my_rank + peer)
                    if rank >= ranks:
                        rank = i32(rank - ranks)
                    raise_flag(params, epoch, rank, my_rank, token, part)
                    peer = i32(peer + 1)
                unit = i32(unit + 32 * blocks)

    return SimpleNamespace(prepare=prepare, send=send, raise_flags=raise_flags)
