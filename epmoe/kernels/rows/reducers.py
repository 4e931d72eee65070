"""Reducing what came back: per token the sum over ranks ascending, in float32, rounded (in each p2p world first)."""

from epmoe.device import (add_rn, ballot, device_fn, f32, f32_as_u32, ffs, i32, lane_id,
                          load16, load_f32, load_i32, load_u32, load_u64, popc, shfl_up, store16, store_u32, u32, u64,
                          warp_broadcast_i32, warp_broadcast_u64)

from .. import elements
from . import peers, pushers, waits
from .row_copy import VECTOR, parts

IN_FLIGHT = 4           # rows of a token that are read together


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


def _sum_row(shape):
    """Device function sum_row(places, to, first, end, lane): vectors [first, end) of the sum over ranks, stored at `to`.

    places: as for rank_sums. Where a token has few rows, their addresses are found once and all loads of one or two
    vectors are in flight together; else rank by rank, as rank_sums does.
    """
    numbers, ranks, sum_of_ranks = elements.make(shape.dtype), shape.n_ranks, rank_sums(shape)
    zeros, add, pack = numbers.zeros, numbers.add, numbers.pack
    width = 0 if 1 < (shape.p2p_world_size or ranks) < ranks else min(ranks, IN_FLIGHT)

    @device_fn
    def take(places, left):
        """Address of the row of the lowest rank in the mask, and the ranks that are left."""
        return u64(warp_broadcast_u64(places, i32(ffs(left) - 1))), u32(left & u32(left - u32(1)))

    @device_fn
    def sum_of(n, a, b, c, d):
        sums = add(zeros(), a)
        if n > 1:
            sums = add(sums, b)
        if n > 2:
            sums = add(sums, c)
        if n > 3:
            sums = add(sums, d)
        return pack(sums)

    @device_fn
    def vectors_of(n, a, b, c, d, at):
        """The vectors of up to four rows; rows beyond n are not looked at."""
        p = load16(a + at)
        q, r, s = p, p, p
        if n > 1:
            q = load16(b + at)
        if width > 2 and n > 2:
            r = load16(c + at)
        if width > 3 and n > 3:
            s = load16(d + at)
        return p, q, r, s

    @device_fn
    def sum_few(places, mask, n, to, first, end, lane):
        a, left = take(places, mask)
        b, c, d = a, a, a
        if n > 1:
            b, left = take(places, left)
        if n > 2:
            c, left = take(places, left)
        if n > 3:
            d, left = take(places, left)
        base = i32(first)
        while base < end:
            # lanes behind the end sum the last vector again and store nothing
            one, two = i32(base + lane), i32(base + lane + 32)
            at, behind = u64(VECTOR) * u64(min(one, i32(end - 1))), u64(VECTOR) * u64(min(two, i32(end - 1)))
            p, q, r, s = vectors_of(n, a, b, c, d, at)
            if width <= 2:
                v, w, y, z = vectors_of(n, a, b, c, d, behind)
                o = sum_of(n, v, w, y, z)
                if two < end:
                    store16(to + behind, o[0], o[1], o[2], o[3])
                base = i32(base + 32)
            o = sum_of(n, p, q, r, s)
            if one < end:
                store16(to + at, o[0], o[1], o[2], o[3])
            base = i32(base + 32)

    @device_fn
    def sum_many(places, to, first, end, lane):
        base = i32(first)
        while base < end:
            at = u64(VECTOR) * u64(min(i32(base + lane), i32(end - 1)))
            q = sum_of_ranks(places, at)
            if base + lane < end:
                store16(to + at, q[0], q[1], q[2], q[3])
            base = i32(base + 32)

    @device_fn
    def sum_row(places, to, first, end, lane):
        mask = u32(ballot(places != u64(0)))
        n = i32(popc(mask))
        if n > 0 and n <= width:
            sum_few(places, mask, n, to, first, end, lane)
        else:
            sum_many(places, to, first, end, lane)

    return sum_row


def make(shape, block, flags):
    """Device function reduce(params, epoch, num_tokens, my_rank, notes) -> whether all rows came.

    Writes out [T, H], and out_probs if probs come back. Warps take parts of tokens in turn, each when its rows have
    come. flags: of row_flags.
    """
    ranks, local, row_bytes, n_meta = shape.n_ranks, shape.n_local_experts, shape.row_bytes, shape.n_meta
    expert_major, has_probs, n_experts = shape.expert_major, shape.has_probs, shape.n_experts
    place, (_, _, mine_before, received, _) = peers.place_in(block, ranks), peers.sums(ranks)
    sum_row, own_stay, claim = _sum_row(shape), pushers.keeps_own(shape), waits.claims(block)
    count_parts, _, _, await_flag = flags
    _, part_span = parts(row_bytes // VECTOR)
    p_rows, p_out, p_out_probs = (block.offset(n) for n in ("row_of", "out", "out_probs"))
    p_x, p_probs = block.offset("x"), block.offset("probs")

    @device_fn
    def sum_probs(params, token, places, lane):
        """Slot by slot the sum over the token's ranks ascending, from +0.0."""
        out, k = u64(load_u64(params + u64(p_out_probs))), i32(lane)
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
        out, rank = u64(load_u64(params + u64(p_out_probs))), i32(0)
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
    def reduce(params, epoch, num_tokens, my_rank, notes):
        lane, row_of, out = i32(lane_id()), u64(load_u64(params + u64(p_rows))), u64(load_u64(params + u64(p_out)))
        rows_at, probs_at = place(params, notes, i32(0), my_rank), place(params, notes, i32(2), my_rank)
        first_row, is_own, n_parts = mine_before(notes, my_rank), own_stay and lane == my_rank, count_parts(notes)
        before = i32(shfl_up(received(notes, my_rank), 1))
        if is_own:                              # rows as this rank received them, among its own arrays
            rows_at, probs_at = u64(load_u64(params + u64(p_x))), u64(load_u64(params + u64(p_probs)))
            first_row = i32(0)
            if lane > 0:
                first_row = before
        unit, ok = claim(params, epoch, lane), True
        while ok and unit < num_tokens * n_parts:
            following = claim(params, epoch, lane)
            token, part, row = i32(unit // n_parts), i32(unit % n_parts), i32(-1)
            at_row, at_probs, awaited = u64(0), u64(0), i32(-1)
            if lane < ranks:
                row = i32(load_i32(row_of + u64(4) * u64(token * ranks + lane)))
            if row >= 0:
                row = i32(first_row + row)
                at_row = u64(rows_at + u64(row) * u64(row_bytes))
                at_probs = u64(probs_at + u64(4) * u64(row) * u64(n_meta))
                if not is_own:
                    awaited = row
            ok = await_flag(params, my_rank, awaited, part, epoch, lane)
            if ok:
                a, b = part_span(part, n_parts)
                sum_row(at_row, out + u64(token) * u64(row_bytes), a, b, lane)
                if has_probs and part == 0:
                    reduce_probs(params, token, at_probs, lane)
            unit = i32(following)
        return ok

    return reduce
