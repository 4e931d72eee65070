"""Combine of small batches without signals: rows are pushed as soon as they are read, and summed as they arrive
(lamport.py).
"""

from epmoe.device import (add_rn, block_dim, block_idx, device_fn, f32, f32_as_u32, grid_dim, i32, lane_id,
                          load16, load_i32, load_u32, n_warps, store16, store_u32, thread_idx, u32,
                          u32_as_f32, u64, warp_broadcast_i32, warp_broadcast_u64, warp_id)

from .. import elements, stamps
from . import exchange, lamport, peers, roles, row_flags
from .row_copy import BATCH, VECTOR, copy_to_lanes, fewest_parts, parts
from .status import ROWS_COMBINE


def _pushing(shape, block, words):
    """Device function push(params, epoch, my_rank, notes): this warp's share of the rows of other ranks.

    Of all of them the first rows first, so that tokens become whole one after another. By all blocks but the last.
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    _, _, _, received, _ = peers.sums(ranks)
    (count_parts, part_span), n_targets = parts(row_bytes // VECTOR), max(ranks - 1, 1)
    (load_batch, _, _), fewest = copy_to_lanes(read_only=True), fewest_parts(row_bytes // VECTOR)
    place, rows_at, row_at, word_at = words.place, words.rows_at, words.row_at, words.word_at
    put, put_batch = words.put, words.put_batch
    p_x, p_probs = block.index("x"), block.index("probs")

    @device_fn
    def push(params, epoch, my_rank, notes):
        lane, rows, ends = i32(lane_id()), u64(0), received(notes, my_rank)
        before = peers.of_lane_before(ends)
        if lane < ranks:
            rows = rows_at(place(params, lane, my_rank), epoch)
        here, x, blocks = i32(ends - before), params[p_x], i32(grid_dim() - 1)
        if lane == my_rank:
            here = i32(0)
        n_turns = i32(row_flags.largest(here) * n_targets)
        unit, warps = i32(warp_id() * blocks + block_idx()), i32(n_warps() * blocks)
        n_parts = i32(max(fewest, count_parts(n_turns, warps)))
        while unit < n_turns * n_parts:
            turn = i32(u32(unit) // u32(n_parts))
            number = i32(u32(turn) // u32(n_targets))
            part, source = i32(unit - turn * n_parts), i32(my_rank + 1 + turn - number * n_targets)
            if source >= ranks:
                source = i32(source - ranks)
            row, (a, b) = i32(warp_broadcast_i32(before, source) + number), part_span(part, n_parts)
            if number >= warp_broadcast_i32(here, source):
                part, a = i32(-1), b
            to = row_at(warp_broadcast_u64(rows, source), number)
            while a < b:
                batch = load_batch(x + u64(row) * u64(row_bytes), a, b, lane)
                put_batch(batch, to, u32(1), i32(0), a, b, lane, epoch)
                a = i32(a + BATCH)
            if has_probs and part == 0 and lane < n_meta:
                probs = params[p_probs] + u64(4) * (u64(row) * u64(n_meta) + u64(lane))
                put(word_at(to, lane), load_u32(probs), epoch)
            unit = i32(unit + warps)

    return push


def _reducing(shape, block, words):
    """Device function reduce(params, epoch, num_tokens, my_rank, notes): this warp's share of this rank's sums.

    A warp sums 32 vectors of a token, a lane one of them; over ranks ascending, from +0.0, rounded once.
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    numbers, (_, _, _, received, _) = elements.make(shape.dtype), peers.sums(ranks)
    zeros, add, pack = numbers.zeros, numbers.add, numbers.pack
    n_vectors = row_bytes // VECTOR
    n_pieces = -(-n_vectors // 32)
    p_rows, p_out, p_out_probs = (block.index(n) for n in ("row_of", "out", "out_probs"))
    place, rows_at, row_at, vector_at = words.place, words.rows_at, words.row_at, words.vector_at
    word_at, take, take_words = words.word_at, words.take, words.take_words
    p_x, p_probs = block.index("x"), block.index("probs")

    def awaited(address, n):
        """Device function (at, rank, my_rank, i) -> address of the words of value i of a rank's row.

        0 where none is awaited: of this rank itself, of a rank without the row, of values behind the n-th.
        """
        @device_fn
        def awaited_at(at, rank, my_rank, i):
            row, there = u64(0), u64(0)
            if rank < ranks and rank != my_rank:
                row = u64(warp_broadcast_u64(at, rank))
            if row != u64(0) and i < n:
                there = address(row, i)
            return there

        return awaited_at

    vector_of, word_of = awaited(vector_at, n_vectors), awaited(word_at, n_meta)

    @device_fn
    def added(sums, at, rank, my_rank, own, vector):
        """The sums, and a rank's vector if it has one."""
        if rank < ranks:
            if warp_broadcast_u64(at, rank) != u64(0):
                if rank == my_rank:
                    vector = own
                sums = add(sums, vector)
        return sums

    @device_fn
    def added_prob(total, at, rank, my_rank, own, prob):
        if rank < ranks:
            if warp_broadcast_u64(at, rank) != u64(0):
                if rank == my_rank:
                    prob = own
                total = add_rn(total, u32_as_f32(prob))
        return total

    @device_fn
    def sum_piece(params, epoch, my_rank, at, out, vector, lane):
        sums, rank, ok, own = zeros(), i32(0), True, (u32(0), u32(0), u32(0), u32(0))
        mine = u64(warp_broadcast_u64(at, my_rank))
        if mine != u64(0):
            own = load16(mine + u64(VECTOR) * u64(min(vector, i32(n_vectors - 1))))
        while ok and rank < ranks:
            b, c, d = i32(rank + 1), i32(rank + 2), i32(rank + 3)
            ok, p, q, r, s = take(
                params, epoch, rank, i32(1), vector_of(at, rank, my_rank, vector), vector_of(at, b, my_rank, vector),
                vector_of(at, c, my_rank, vector), vector_of(at, d, my_rank, vector))
            sums = added(sums, at, rank, my_rank, own, p)
            sums = added(sums, at, b, my_rank, own, q)
            sums = added(sums, at, c, my_rank, own, r)
            sums = added(sums, at, d, my_rank, own, s)
            rank = i32(rank + 4)
        q = pack(sums)
        if ok and vector < n_vectors:
            store16(out + u64(VECTOR) * u64(vector), q[0], q[1], q[2], q[3])
        return ok

    @device_fn
    def sum_probs(params, epoch, my_rank, at, token, own_row, lane):
        total, rank, ok, own = f32(0), i32(0), True, u32(0)
        if own_row >= 0 and lane < n_meta:
            probs = params[p_probs]
            own = u32(load_u32(probs + u64(4) * (u64(own_row) * u64(n_meta) + u64(lane))))
        while ok and rank < ranks:
            b, c, d = i32(rank + 1), i32(rank + 2), i32(rank + 3)
            ok, p, q, r, s = take_words(
                params, epoch, rank, i32(1), word_of(at, rank, my_rank, lane), word_of(at, b, my_rank, lane),
                word_of(at, c, my_rank, lane), word_of(at, d, my_rank, lane))
            total = added_prob(total, at, rank, my_rank, own, p)
            total = added_prob(total, at, b, my_rank, own, q)
            total = added_prob(total, at, c, my_rank, own, r)
            total = added_prob(total, at, d, my_rank, own, s)
            rank = i32(rank + 4)
        if ok and lane < n_meta:
            out = params[p_out_probs] + u64(4) * (u64(token) * u64(n_meta) + u64(lane))
            store_u32(out, f32_as_u32(total))
        return ok

    @device_fn
    def reduce(params, epoch, num_tokens, my_rank, notes):
        lane, rows, ends = i32(lane_id()), u64(0), received(notes, my_rank)
        before = peers.of_lane_before(ends)
        row_of, out = params[p_rows], params[p_out]
        x, ok = params[p_x], True
        if lane < ranks:
            rows = rows_at(place(params, my_rank, lane), epoch)
        blocks = i32(grid_dim() - 1)
        unit, warps = i32(warp_id() * blocks + block_idx()), i32(n_warps() * blocks)
        while ok and unit < num_tokens * n_pieces:
            token, row, at = i32(u32(unit) // u32(n_pieces)), i32(-1), u64(0)
            piece = i32(unit - token * n_pieces)
            if lane < ranks:
                row = i32(load_i32(row_of + u64(4) * u64(token * ranks + lane)))
            if row >= 0:
                at = row_at(rows, row)
                if lane == my_rank:             # as this rank received it, in its own array
                    row = i32(row + before)
                    at = u64(x + u64(row) * u64(row_bytes))
            ok = sum_piece(params, epoch, my_rank, at, out + u64(token) * u64(row_bytes), i32(32 * piece + lane), lane)
            if ok and has_probs and piece == 0:
                own_row = i32(warp_broadcast_i32(row, my_rank))
                ok = sum_probs(params, epoch, my_rank, at, token, own_row, lane)
            unit = i32(unit + warps)
        return ok

    return reduce


def make(shape, block, of_block, meeting, mark):
    """Device function combine(params, epoch, num_tokens, my_rank, notes): the rest of the call, of every block.

    Every block but the leader block pushes, and then reduces.
    """
    if not shape.lamport:
        return _never
    words = lamport.make(shape, block, ROWS_COMBINE)
    push, reduce = _pushing(shape, block, words), _reducing(shape, block, words)
    say_begun, end = of_block.say_begun, exchange.ending(of_block, meeting.await_notes, ROWS_COMBINE)

    @device_fn
    def combine(params, epoch, num_tokens, my_rank, notes):
        if thread_idx() == block_dim() - 1:
            say_begun(params)
        if roles.is_clerk():
            end(params, epoch, my_rank, notes)
        else:
            push(params, epoch, my_rank, notes)
            mark(params, stamps.SENT)
            reduce(params, epoch, num_tokens, my_rank, notes)
            mark(params, stamps.REDUCED)
        mark(params, stamps.LEFT)

    return combine


@device_fn
def _never(params, epoch, num_tokens, my_rank, notes):
    return
