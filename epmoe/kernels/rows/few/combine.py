"""Combine of small batches without signals: rows are pushed as soon as they are read, and summed as they arrive
(lamport.py).
"""

from epmoe.device import (add_rn, device_fn, f32, f32_as_u32, i32, lane_id, load16, load_i32, load_u32, store16,
                          store_u32, u32, u32_as_f32, u64, warp_broadcast_i32, warp_broadcast_u64)

from ... import elements, stamps
from ...lamport import store_row
from .. import announce, mailbox, push
from .. import call as calls
from ..bits import largest, of_lane_before, split, warps_of_rank
from ..copy import BATCH, copying, fewest_parts, parts
from ..shape import VECTOR, namespace, p
from ..wait import ROWS_COMBINE
from . import lamport


def _pushing(shape):
    """Device function push(call, notes): this warp's share of the rows of other ranks.

    Of all of them the first rows first, so that tokens become whole one after another. By all blocks but the last.
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    mail, at, unit_of = mailbox.reading(ranks), lamport.places(shape), push.of_part(shape).unit
    spans, fewest, n_targets = parts(shape.n_vectors), fewest_parts(shape), max(ranks - 1, 1)
    rows_of, rows_to = copying(read_only=True), copying(read_only=True, store=store_row)

    @device_fn
    def push_rows(call, notes):
        lane, rows, ends = i32(lane_id()), u64(0), mail.received(notes, call.my_rank)
        before = of_lane_before(ends)
        if lane < ranks:
            rows = at.rows(at.of(call.params, lane, call.my_rank), call.epoch)
        here, x = i32(ends - before), call.params[p.x]
        if lane == call.my_rank:
            here = i32(0)
        n_turns, (unit, warps) = i32(largest(here) * n_targets), warps_of_rank()
        n_parts = i32(max(fewest, spans.count(n_turns, warps)))
        while unit < n_turns * n_parts:
            part, number, source = unit_of(call.my_rank, unit, n_parts)
            row, (a, b) = i32(warp_broadcast_i32(before, source) + number), spans.span(part, n_parts)
            if number >= warp_broadcast_i32(here, source):
                part, a = i32(-1), b
            to = at.row(warp_broadcast_u64(rows, source), number)
            while a < b:
                batch = rows_of.load(x + u64(row) * u64(row_bytes), a, b, lane)
                rows_to.store(batch, to, u32(1), i32(0), a, b, lane)
                a = i32(a + BATCH)
            if has_probs and part == 0 and lane < n_meta:
                probs = call.params[p.probs] + u64(4) * (u64(row) * u64(n_meta) + u64(lane))
                lamport.put(at.word(to, lane), load_u32(probs), call.epoch)
            unit = i32(unit + warps)

    return push_rows


def _reducing(shape):
    """Device function reduce(call, notes): this warp's share of this rank's sums.

    A warp sums 32 vectors of a token, a lane one of them; over ranks ascending, from +0.0, rounded once.
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    mail, at, take, numbers = (mailbox.reading(ranks), lamport.places(shape), lamport.taking(ROWS_COMBINE),
                               elements.make(shape.dtype))
    zeros, add, pack, n_vectors = numbers.zeros, numbers.add, numbers.pack, shape.n_vectors
    n_pieces = -(-n_vectors // 32)

    def awaited(address, n):
        """Device function (rows, rank, my_rank, i) -> addresses of value i of the rows of four ranks from `rank` on.

        0 where none is awaited: of this rank itself, of a rank without the row, of values behind the n-th.
        """
        @device_fn
        def awaited_at(rows, rank, my_rank, i):
            row, there = u64(0), u64(0)
            if rank < ranks and rank != my_rank:
                row = u64(warp_broadcast_u64(rows, rank))
            if row != u64(0) and i < n:
                there = address(row, i)
            return there

        @device_fn
        def four_awaited(rows, rank, my_rank, i):
            return (awaited_at(rows, rank, my_rank, i), awaited_at(rows, i32(rank + 1), my_rank, i),
                    awaited_at(rows, i32(rank + 2), my_rank, i), awaited_at(rows, i32(rank + 3), my_rank, i))

        return four_awaited

    vectors_of, words_of = awaited(at.vector, n_vectors), awaited(at.word, n_meta)

    @device_fn
    def added(sums, rows, rank, my_rank, own, vector):
        """The sums, and a rank's vector if it has one."""
        if rank < ranks:
            if warp_broadcast_u64(rows, rank) != u64(0):
                if rank == my_rank:
                    vector = own
                sums = add(sums, vector)
        return sums

    @device_fn
    def added_prob(total, rows, rank, my_rank, own, prob):
        if rank < ranks:
            if warp_broadcast_u64(rows, rank) != u64(0):
                if rank == my_rank:
                    prob = own
                total = add_rn(total, u32_as_f32(prob))
        return total

    @device_fn
    def sum_piece(call, rows, out, vector):
        sums, rank, ok, own, me = zeros(), i32(0), True, (u32(0), u32(0), u32(0), u32(0)), call.my_rank
        mine = u64(warp_broadcast_u64(rows, me))
        if mine != u64(0):
            own = load16(mine + u64(VECTOR) * u64(min(vector, i32(n_vectors - 1))))
        while ok and rank < ranks:
            ok, _, q = take.vectors(call, rank, i32(1), u64(0), vectors_of(rows, rank, me, vector))
            sums = added(sums, rows, rank, me, own, q[0])
            sums = added(sums, rows, i32(rank + 1), me, own, q[1])
            sums = added(sums, rows, i32(rank + 2), me, own, q[2])
            sums = added(sums, rows, i32(rank + 3), me, own, q[3])
            rank = i32(rank + 4)
        s = pack(sums)
        if ok and vector < n_vectors:
            store16(out + u64(VECTOR) * u64(vector), s[0], s[1], s[2], s[3])
        return ok

    @device_fn
    def sum_probs(call, rows, token, own_row, lane):
        total, rank, ok, own, me = f32(0), i32(0), True, u32(0), call.my_rank
        if own_row >= 0 and lane < n_meta:
            probs = call.params[p.probs]
            own = u32(load_u32(probs + u64(4) * (u64(own_row) * u64(n_meta) + u64(lane))))
        while ok and rank < ranks:
            ok, w = take.words(call, rank, i32(1), words_of(rows, rank, me, lane))
            total = added_prob(total, rows, rank, me, own, w[0])
            total = added_prob(total, rows, i32(rank + 1), me, own, w[1])
            total = added_prob(total, rows, i32(rank + 2), me, own, w[2])
            total = added_prob(total, rows, i32(rank + 3), me, own, w[3])
            rank = i32(rank + 4)
        if ok and lane < n_meta:
            out = call.params[p.out_probs] + u64(4) * (u64(token) * u64(n_meta) + u64(lane))
            store_u32(out, f32_as_u32(total))
        return ok

    @device_fn
    def reduce(call, notes):
        params, lane, windows, ends, ok = call.params, i32(lane_id()), u64(0), mail.received(notes, call.my_rank), True
        before = of_lane_before(ends)
        if lane < ranks:
            windows = at.rows(at.of(params, call.my_rank, lane), call.epoch)
        unit, warps = warps_of_rank()
        while ok and unit < call.num_tokens * n_pieces:
            (token, piece), row, rows = split(unit, n_pieces), i32(-1), u64(0)
            if lane < ranks:
                row = i32(load_i32(params[p.row_of] + u64(4) * u64(token * ranks + lane)))
            if row >= 0:
                rows = at.row(windows, row)
                if lane == call.my_rank:        # as this rank received it, in its own array
                    row = i32(row + before)
                    rows = u64(params[p.x] + u64(row) * u64(row_bytes))
            ok = sum_piece(call, rows, params[p.out] + u64(token) * u64(row_bytes), i32(32 * piece + lane))
            if ok and has_probs and piece == 0:
                ok = sum_probs(call, rows, token, i32(warp_broadcast_i32(row, call.my_rank)), lane)
            unit = i32(unit + warps)
        return ok

    return reduce


def combining(shape, flags, mark):
    """Device functions: namespace. fits(notes): whether rows of this call travel so, the same on all ranks.

    combine(call, notes): the rest of the call, of every block. Every block but the leader block pushes, and then
    reduces. The leader block ends the call when all ranks and all blocks have begun it.
    """
    push_rows, reduce_rows, end = _pushing(shape), _reducing(shape), calls.ends(shape.n_ranks).end
    may_end = announce.closing(shape, ROWS_COMBINE, "without_counts")

    @device_fn
    def combine(call, notes):
        if calls.is_last_thread():
            calls.say_begun(call.params)
        if calls.is_leader():
            if may_end(call, notes):
                end(call)
        else:
            push_rows(call, notes)
            mark(call.params, stamps.SENT)
            reduce_rows(call, notes)
            mark(call.params, stamps.REDUCED)
        mark(call.params, stamps.LEFT)

    return namespace("few", fits=mailbox.all_few(shape.n_ranks, shape.lamport, told=False), combine=combine)
