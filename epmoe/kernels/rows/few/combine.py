"""Combine of small batches without signals: rows are pushed as soon as they are read, and summed as they arrive
(lamport.py). In expert-major, what is pushed is the sum over the local experts, also to this rank itself.
"""

from epmoe.device import (add_rn, device_fn, f32, f32_as_u32, i32, lane_id, load16, load_u32, store16, store_u32, u32,
                          u32_as_f32, u64, warp_broadcast_i32, warp_broadcast_u64)

from ... import elements, stamps
from ...bits import adding_four, four, largest, split, warps_of_rank
from ...lamport import store_row
from ...params import VECTOR, by_lanes, word_in
from .. import layout, mailbox, push, wait
from ..copy import fewest_parts, parts
from ..shape import p
from . import lamport


def _pushing(shape):
    """Device function push(call, announced): this warp's share of the rows that this rank received.

    Of all of them the first rows first, so that tokens become whole one after another. By all blocks but the last.
    """
    ranks, n_meta, has_probs, stays = shape.n_ranks, shape.n_meta, shape.has_probs, shape.keeps_own
    mail, at, part_of_row = mailbox.reading(ranks), lamport.places(shape), push.of_part(shape, store_row)
    spans, fewest, n_targets = parts(shape.n_vectors), fewest_parts(shape), max(push.n_targets_of(shape), 1)
    push_prob = by_lanes(lambda i, call, row, to:
                         lamport.put(at.word(to, i), part_of_row.prob(call.params, row, i), call.epoch))

    @device_fn
    def push_rows(call, announced):
        lane, (here, before) = i32(lane_id()), mail.received(announced, call.my_rank)
        rows = at.rows(at.of(call.params, lane, call.my_rank), call.epoch) if lane < ranks else u64(0)
        here = i32(0) if stays and lane == call.my_rank else here
        n_turns, (unit, warps) = i32(largest(here) * n_targets), warps_of_rank()
        n_parts = i32(max(fewest, spans.count(n_turns, warps)))
        while unit < n_turns * n_parts:
            part, number, src_rank = part_of_row.unit(call.my_rank, unit, n_parts)
            row, (a, b) = i32(warp_broadcast_i32(before, src_rank) + number), spans.span(part, n_parts)
            to = at.row(warp_broadcast_u64(rows, src_rank), number)
            if number < warp_broadcast_i32(here, src_rank):
                if a < b:
                    part_of_row.row(call.params, row, to, a, b, lane)
                if has_probs and part == 0:
                    push_prob(n_meta, call, row, to)
            unit = i32(unit + warps)

    return push_rows


def _taking(shape, address, n, take):
    """Device function (call, rows, rank, i) -> (whether all arrived, value i of the rows of four ranks from `rank` on).

    address(row, i): of a value, one of n. take(call, rank, at): of four addresses. What is not awaited has address 0:
    of this rank's own row that stays, of a rank without the row, of values behind the n-th.
    """
    ranks, stays = shape.n_ranks, shape.keeps_own

    @device_fn
    def awaited_at(given, rank):
        call, rows, i = given
        is_awaited = rank < ranks and not (stays and rank == call.my_rank)
        row = u64(warp_broadcast_u64(rows, rank)) if is_awaited else u64(0)
        return address(row, i) if row != u64(0) and i < n else u64(0)

    four_awaited = four(awaited_at)
    return device_fn(lambda call, rows, rank, i: take(call, rank, four_awaited((call, rows, i), rank, 1)))


def _adding(shape, add):
    """Device function (total, (call, rows, own), rank, 1, values): of four ranks, those that have the row, in turn.

    own: what stands for a value of this rank's own row, where that stays. add(total, value).
    """
    ranks, stays = shape.n_ranks, shape.keeps_own

    @device_fn
    def add_row(total, given, rank, value):
        call, rows, own = given
        if rank < ranks:
            if warp_broadcast_u64(rows, rank) != u64(0):
                total = add(total, own if stays and rank == call.my_rank else value)
        return total

    return adding_four(add_row)


def _returning_probs(shape, take):
    """Device function (call, rows, token, own_row, lane) -> whether all arrived: out_probs of a token, by a warp.

    Slot by slot the sum over the token's ranks ascending, from +0.0; expert-major each expert's number from its rank,
    bit by bit, and zero for ranks that the token did not go to. rows: in lane r that of rank r, 0 for none.
    """
    ranks, n_local, n_meta, num_experts = shape.n_ranks, shape.num_local_experts, shape.n_meta, shape.num_experts
    add_rows = _adding(shape, device_fn(lambda total, prob: add_rn(total, u32_as_f32(prob))))
    take_words = device_fn(lambda call, rank, at: take.words(call, rank, i32(1), at))
    take_four = _taking(shape, lamport.places(shape).word, n_meta, take_words)

    @device_fn
    def sum_probs(call, rows, token, own_row, lane):
        total, rank, ok, own = f32(0), i32(0), True, u32(0)
        if own_row >= 0 and lane < n_meta:
            own = u32(load_u32(word_in(call.params[p.probs], own_row, n_meta, lane)))
        while ok and rank < ranks:
            ok, probs = take_four(call, rows, rank, lane)
            total = add_rows(total, (call, rows, own), rank, 1, probs)
            rank = i32(rank + 4)
        if ok and lane < n_meta:
            store_u32(word_in(call.params[p.out_probs], token, n_meta, lane), f32_as_u32(total))
        return ok

    @device_fn
    def store_prob(out, given, rank, prob):
        token, expert = given
        if rank < ranks and expert < n_local:
            store_u32(word_in(out, token, num_experts, i32(rank * n_local + expert)), prob)
        return out

    store_probs = adding_four(store_prob)

    @device_fn
    def collect_probs(call, rows, token, own_row, lane):
        rank, ok = i32(0), True
        while ok and rank < ranks:
            expert = i32(lane)
            while ok and expert - lane < n_local:
                ok, probs = take_four(call, rows, rank, expert)
                if ok:
                    store_probs(call.params[p.out_probs], (token, expert), rank, 1, probs)
                expert = i32(expert + 32)
            rank = i32(rank + 4)
        return ok

    return collect_probs if shape.expert_major else sum_probs


def _reducing(shape):
    """Device function reduce(call, announced): this warp's share of this rank's sums.

    A warp sums 32 vectors of a token, a lane one of them; over ranks ascending, from +0.0, rounded once.
    """
    ranks, row_bytes, has_probs, stays = shape.n_ranks, shape.row_bytes, shape.has_probs, shape.keeps_own
    mail, at, take, numbers = (mailbox.reading(ranks), lamport.places(shape), lamport.taking(wait.ROWS_COMBINE),
                               elements.make(shape.dtype))
    zero_sums, pack, n_vectors, n_pieces = numbers.zeros, numbers.pack, shape.n_vectors, -(-shape.n_vectors // 32)
    add_rows, return_probs, row_of = _adding(shape, numbers.add), _returning_probs(shape, take), layout.row_of(ranks)

    take_vectors = device_fn(lambda call, rank, addresses: take.vectors(call, rank, i32(1), u64(0), addresses))
    take_four = _taking(shape, at.vector, n_vectors, take_vectors)

    @device_fn
    def own_vector(call, rows, vector):
        q, mine = (u32(0), u32(0), u32(0), u32(0)), u64(warp_broadcast_u64(rows, call.my_rank)) if stays else u64(0)
        if mine != u64(0):
            q = load16(mine + u64(VECTOR) * u64(min(vector, i32(n_vectors - 1))))
        return q

    @device_fn
    def sum_piece(call, rows, out, vector):
        sums, rank, ok, own = zero_sums(), i32(0), True, own_vector(call, rows, vector)
        while ok and rank < ranks:
            ok, _, vectors = take_four(call, rows, rank, vector)
            sums = add_rows(sums, (call, rows, own), rank, 1, vectors)
            rank = i32(rank + 4)
        s = pack(sums)
        if ok and vector < n_vectors:
            store16(out + u64(VECTOR) * u64(vector), s[0], s[1], s[2], s[3])
        return ok

    @device_fn
    def reduce(call, announced):
        params, lane, (_, before), ok = call.params, i32(lane_id()), mail.received(announced, call.my_rank), True
        windows = at.rows(at.of(params, call.my_rank, lane), call.epoch) if lane < ranks else u64(0)
        unit, warps = warps_of_rank()
        while ok and unit < call.num_tokens * n_pieces:
            (token, piece), rows = split(unit, n_pieces), u64(0)
            row = i32(row_of(params[p.row_of], token, lane))
            if row >= 0:
                rows = at.row(windows, row)
                if stays and lane == call.my_rank:      # as this rank received it, in its own array
                    row = i32(row + before)
                    rows = u64(params[p.x] + u64(row) * u64(row_bytes))
            ok = sum_piece(call, rows, params[p.out] + u64(token) * u64(row_bytes), i32(32 * piece + lane))
            if ok and has_probs and piece == 0:
                ok = return_probs(call, rows, token, i32(warp_broadcast_i32(row, call.my_rank)), lane)
            unit = i32(unit + warps)
        return ok

    return reduce


def combining(shape, mark):
    """`few` of announce.beginning: every block but the leader block pushes, and then reduces."""
    push_rows, reduce_rows = _pushing(shape), _reducing(shape)

    @device_fn
    def push_and_reduce(call, announced, first):
        push_rows(call, announced)
        mark(call.params, stamps.SENT)
        reduce_rows(call, announced)
        mark(call.params, stamps.REDUCED)

    return lamport.known_call(shape, wait.ROWS_COMBINE, mark, device_fn(lambda call: None), push_and_reduce)
