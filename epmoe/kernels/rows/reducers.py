"""Reducing what came back: per token the sum over ranks ascending, in float32, rounded (in each p2p world first)."""

from epmoe.device import (add_rn, block_idx, device_fn, f32, f32_as_u32, grid_dim, i32, lane_id, load16, load_f32,
                          load_i32, load_u32, load_u64, n_warps, store16, store_u32, u32, u64, warp_broadcast_i32,
                          warp_broadcast_u64, warp_id)

from .. import elements
from . import peers
from .row_copy import VECTOR


def rank_sums(shape):
    """Device function (places, at, lane) -> the rounded sum of the vectors at `at` of the rows of all ranks, ascending.

    places: lane r has the address of rank r's row, 0 for none; rows that do not exist are not read. Every lane sums its
    own vector.
    """
    numbers, ranks = elements.make(shape.dtype), shape.n_ranks
    zeros, add, pack = numbers.zeros, numbers.add, numbers.pack
    a_world = shape.p2p_world_size or ranks
    by_world = 1 < a_world < ranks

    @device_fn
    def load_rank(places, rank, end, at):
        q, there = (u32(0), u32(0), u32(0), u32(0)), False
        if rank < end:
            row = u64(warp_broadcast_u64(places, rank))
            if row != u64(0):
                q, there = load16(row + at), True
        return q, there

    @device_fn
    def sum_of_ranks(places, at, first, end):
        sums, rank = zeros(), i32(first)
        while rank < end:
            a, has_a = load_rank(places, rank, end, at)             # four loads in flight
            b, has_b = load_rank(places, i32(rank + 1), end, at)
            c, has_c = load_rank(places, i32(rank + 2), end, at)
            d, has_d = load_rank(places, i32(rank + 3), end, at)
            if has_a:
                sums = add(sums, a)
            if has_b:
                sums = add(sums, b)
            if has_c:
                sums = add(sums, c)
            if has_d:
                sums = add(sums, d)
            rank = i32(rank + 4)
        return pack(sums)

    if not by_world:
        @device_fn
        def sum_of_all(places, at):
            return sum_of_ranks(places, at, i32(0), i32(ranks))

        return sum_of_all

    @device_fn
    def sum_of_worlds(places, at):
        sums, first = zeros(), i32(0)
        while first < ranks:
            sums = add(sums, sum_of_ranks(places, at, first, i32(first + a_world)))
            first = i32(first + a_world)
        return pack(sums)

    return sum_of_worlds


def make(shape, block, note_of):
    """Device function reduce(params, epoch, num_tokens, my_rank): out [T, H], and out_probs if probs came back."""
    ranks, local, row_bytes, n_meta = shape.n_ranks, shape.n_local_experts, shape.row_bytes, shape.n_meta
    expert_major, has_probs, n_experts = shape.expert_major, shape.has_probs, shape.n_experts
    place, (_, _, mine_before, _, _) = peers.place_in(block), peers.sums(ranks)
    sum_of_ranks = rank_sums(shape)
    n_vectors = row_bytes // VECTOR
    n_runs = (n_vectors + 31) // 32                     # a run: one vector a lane
    p_counts, p_rows, p_out, p_probs = (block.offset(n) for n in ("counts", "row_of", "out", "out_probs"))
    stride = 4 * ranks

    @device_fn
    def sum_probs(params, token, row, probs_at, lane):
        """Slot by slot the sum over the token's ranks ascending, from +0.0."""
        out, k = u64(load_u64(params + u64(p_probs))), i32(lane)
        total, rank = f32(0), i32(0)
        while rank < ranks:
            there = i32(warp_broadcast_i32(row, rank))
            if there >= 0 and k < n_meta:
                total = add_rn(total, f32(load_f32(probs_at + u64(4) * (u64(there) * u64(n_meta) + u64(k)))))
            rank = i32(rank + 1)
        if k < n_meta:
            store_u32(out + u64(4) * (u64(token) * u64(n_meta) + u64(k)), f32_as_u32(total))

    @device_fn
    def copy_probs(params, token, row, probs_at, lane):
        """Each expert's number from its rank, bit by bit; zero for ranks that the token did not go to."""
        out, rank = u64(load_u64(params + u64(p_probs))), i32(0)
        while rank < ranks:
            there, expert = i32(warp_broadcast_i32(row, rank)), i32(lane)
            while expert < local:
                value = u32(0)
                if there >= 0:
                    value = u32(load_u32(probs_at + u64(4) * (u64(there) * u64(local) + u64(expert))))
                store_u32(out + u64(4) * (u64(token) * u64(n_experts) + u64(rank * local + expert)), value)
                expert = i32(expert + 32)
            rank = i32(rank + 1)

    reduce_probs = copy_probs if expert_major else sum_probs

    @device_fn
    def reduce(params, epoch, num_tokens, my_rank):
        lane, row_of, out = i32(lane_id()), u64(load_u64(params + u64(p_rows))), u64(load_u64(params + u64(p_out)))
        note = note_of(params, epoch, my_rank, my_rank)
        rows_at, probs_at = place(params, note, i32(0), my_rank), place(params, note, i32(2), my_rank)
        first_row = mine_before(u64(load_u64(params + u64(p_counts))), u64(stride), my_rank)
        unit = i32(warp_id() * grid_dim() + block_idx())
        while unit < num_tokens * n_runs:
            token, run = i32(unit // n_runs), i32(unit % n_runs)
            row, at_row = i32(-1), u64(0)
            if lane < ranks:
                row = i32(load_i32(row_of + u64(4) * u64(token * ranks + lane)))
            if row >= 0:
                row = i32(first_row + row)
                at_row = u64(rows_at + u64(row) * u64(row_bytes))
            # lanes behind the last column do it again and store nothing: all stay together for the broadcasts
            vector = i32(min(run * 32 + lane, n_vectors - 1))
            q = sum_of_ranks(at_row, u64(VECTOR) * u64(vector))
            if run * 32 + lane < n_vectors:
                store16(out + u64(token) * u64(row_bytes) + u64(VECTOR) * u64(vector), q[0], q[1], q[2], q[3])
            if has_probs and run == 0:
                reduce_probs(params, token, row, probs_at, lane)
            unit = i32(unit + n_warps() * grid_dim())

    return reduce
