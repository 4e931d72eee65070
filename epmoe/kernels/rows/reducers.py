"""Reduces returned rows: for each token the sum over ranks ascending, in float32, rounded (in each p2p world first)."""

from epmoe.device import (add_rn, block_idx, device_fn, f32, f32_as_u32, grid_dim, i32, lane_id, load16, load_f32,
                          load_i32, load_u32, n_warps, shfl_up, store16, store_u32, u32, u64,
                          warp_broadcast_u64, warp_id)

from .. import elements
from . import control, peers, pushers, row_sums, waits, windows
from .row_copy import VECTOR, parts


def world_sums(shape):
    """Device function (places, at) -> the sum over p2p worlds of their sums, each rounded, of vectors at `at` of rows.

    places: lane r has the address of rank r's row, 0 for none; rows that do not exist are not read. Ranks and worlds
    ascend. Every lane sums its own vector.
    """
    numbers, ranks, a_world = elements.make(shape.dtype), shape.n_ranks, shape.p2p_world_size
    zeros, add, pack = numbers.zeros, numbers.add, numbers.pack

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

    @device_fn
    def sum_of_worlds(places, at):
        sums, first = zeros(), i32(0)
        while first < ranks:
            sums = add(sums, sum_of_ranks(places, at, first, i32(first + a_world)))
            first = i32(first + a_world)
        return pack(sums)

    return sum_of_worlds


def _sum_row(shape):
    """Device function sum_row(places, to, first, end, lane): vectors [first, end) of the sum over ranks, into `to`.

    places: as for world_sums.
    """
    by_world = 1 < shape.p2p_world_size < shape.n_ranks
    if by_world:
        sum_of_worlds = world_sums(shape)

        @device_fn
        def sum_by_world(places, to, first, end, lane):
            base = i32(first)
            while base < end:
                # lanes behind the end sum the last vector again and store nothing: all stay together
                at = u64(VECTOR) * u64(min(i32(base + lane), i32(end - 1)))
                q = sum_of_worlds(places, at)
                if base + lane < end:
                    store16(to + at, q[0], q[1], q[2], q[3])
                base = i32(base + 32)

        return sum_by_world

    gather, sum_rows = row_sums.make(shape.dtype)

    @device_fn
    def sum_all(places, to, first, end, lane):
        rows, n = gather(places, u64(0), i32(0), lane)
        sum_rows(rows, n, to, first, end, lane)

    return sum_all


def make(shape, block, flags, few):
    """Device function reduce(params, epoch, num_tokens, my_rank, notes, are_few) -> whether all rows came.

    Writes out [T, H], and out_probs if probs come back. Warps take parts of tokens in turn, each when its rows have
    come; of few tokens pieces of these parts, a vector a lane. flags: of row_flags; few: of windows.
    """
    ranks, local, row_bytes, n_meta = shape.n_ranks, shape.n_local_experts, shape.row_bytes, shape.n_meta
    expert_major, has_probs, n_experts = shape.expert_major, shape.has_probs, shape.n_experts
    place, (_, _, mine_before, received, _) = peers.place_in(block, ranks), peers.sums(ranks)
    sum_row, own_stay, claim = _sum_row(shape), pushers.keeps_own(shape), waits.claims(block, control.CLAIMED)
    (count_parts, _, _, _, await_flag), await_window = flags, few.await_flag
    n_vectors, rows_in_window, probs_in_window = row_bytes // VECTOR, few.at[windows.X], few.at[windows.PROBS]
    n_pieces = -(-n_vectors // 32)
    _, part_span = parts(row_bytes // VECTOR)
    p_rows, p_out, p_out_probs = (block.index(n) for n in ("row_of", "out", "out_probs"))
    p_x, p_probs = block.index("x"), block.index("probs")

    @device_fn
    def sum_probs(params, token, places, lane):
        """Slot by slot the sum over the token's ranks ascending, from +0.0."""
        out, k = params[p_out_probs], i32(lane)
        total, rank = f32(0), i32(0)
        while rank < ranks:
            there = u64(warp_broadcast_u64(places, rank))
            if there != u64(0) and k < n_meta:
                total = add_rn(total, f32(load_f32(there + u64(4) * u64(k))))
            rank = i32(rank + 1)
        if k < n_meta:
            store_u32(out + u64(4) * (u64(token) * u64(n_meta) + u64(k)), f32_as_u32(total))

    @device_fn
    def copy_probs(params, token, places, lane):
        """Each expert's number from its rank, bit by bit; zero for ranks that the token did not go to."""
        out, rank = params[p_out_probs], i32(0)
        while rank < ranks:
            there, expert = u64(warp_broadcast_u64(places, rank)), i32(lane)
            while expert < local:
                value = u32(0)
                if there != u64(0):
                    value = u32(load_u32(there + u64(4) * u64(expert)))
                store_u32(out + u64(4) * (u64(token) * u64(n_experts) + u64(rank * local + expert)), value)
                expert = i32(expert + 32)
            rank = i32(rank + 1)

    reduce_probs = copy_probs if expert_major else sum_probs

    @device_fn
    def reduce(params, epoch, num_tokens, my_rank, notes, are_few):
        lane, row_of, out = i32(lane_id()), params[p_rows], params[p_out]
        rows_at, probs_at, first_row, n_parts = u64(0), u64(0), i32(0), count_parts(notes)
        is_own, n_shares, a_part = own_stay and lane == my_rank, i32(n_parts), i32(1)
        if not are_few:
            rows_at, probs_at = place(params, notes, i32(0), my_rank), place(params, notes, i32(2), my_rank)
            first_row = mine_before(notes, my_rank)
        else:
            _, longest = part_span(i32(0), n_parts)
            n_shares, a_part = i32(n_pieces), i32((longest + 31) >> 5)
            if lane < ranks:
                rows_at = rows_in_window(params, epoch, my_rank, lane)
                probs_at = probs_in_window(params, epoch, my_rank, lane)
        before = i32(shfl_up(received(notes, my_rank), 1))
        if is_own:                              # rows as this rank received them, among its own arrays
            rows_at, probs_at = params[p_x], params[p_probs]
            first_row = i32(0)
            if lane > 0:
                first_row = before
        workers, ok = i32(grid_dim() - 1), True     # for few rows: all blocks but the leader block
        warps, unit, following = i32(n_warps() * workers), i32(warp_id() * workers + block_idx()), i32(0)
        if not are_few:
            unit = claim(params, epoch, lane)
        while ok and unit < num_tokens * n_shares:
            following = i32(unit + warps)
            if not are_few:
                following = claim(params, epoch, lane)
            token, row = i32(u32(unit) // u32(n_shares)), i32(-1)
            share = i32(unit - token * n_shares)
            part, at_row, at_probs, awaited = i32(u32(share) // u32(a_part)), u64(0), u64(0), i32(-1)
            if lane < ranks:
                row = i32(load_i32(row_of + u64(4) * u64(token * ranks + lane)))
            if row >= 0:
                row = i32(first_row + row)
                at_row = u64(rows_at + u64(row) * u64(row_bytes))
                at_probs = u64(probs_at + u64(4) * u64(row) * u64(n_meta))
                if not is_own:
                    awaited = row
            a, b = part_span(part, n_parts)
            if are_few:
                a, b = i32(32 * share), i32(min(i32(32 * share + 32), n_vectors))
                ok = await_window(params, epoch, my_rank, lane, awaited, part)
            else:
                ok = await_flag(params, my_rank, awaited, part, epoch, lane)
            if ok:
                sum_row(at_row, out + u64(token) * u64(row_bytes), a, b, lane)
                if has_probs and share == 0:
                    reduce_probs(params, token, at_probs, lane)
            unit = i32(following)
        return ok

    return reduce
