"""Combine of small batches without signals: rows are pushed before peers announce themselves, and summed as their
words arrive (lamport.py). In expert-major, ranks push sums over their local experts, also to themselves.
"""

from epmoe.device import (device_fn, i32, lane_id, load16, store16, u32, u64, warp_broadcast_i32, warp_broadcast_u64,
                          warp_max_i32)

from ... import elements, stamps
from ...bits import four, split, warps_of_rank
from ...lamport import store_row
from ...params import VECTOR, by_lanes
from .. import layout, mailbox, push, reduce, wait
from ..copy import fewest_parts, parts
from ..shape import p
from . import lamport


def _pushing(shape):
    """Device function push(call, announced): pushes this warp's share of the rows of x that do not stay.

    The first rows of all ranks come first, so tokens become complete one after another. All but the leader block push.
    """
    ranks, n_meta, has_probs, stays = shape.n_ranks, shape.n_meta, shape.has_probs, not shape.expert_major
    mail, at, push_part = mailbox.reading(ranks), lamport.addresses(shape), push.part_pushing(shape, store_row)
    spans, fewest, n_dst_ranks = parts(shape.n_vectors), fewest_parts(shape), max(push.n_dst_ranks_of(shape), 1)
    push_prob = by_lanes(lambda i, call, row, to:
                         lamport.put(at.word(to, i), push_part.prob(call.params, row, i), call.epoch))

    @device_fn
    def push_rows(call, announced):
        lane, (received, before) = i32(lane_id()), mail.received(announced, call.my_rank)
        windows = at.rows(at.of(call.params, lane, call.my_rank), call.epoch) if lane < ranks else u64(0)
        received = i32(0) if stays and lane == call.my_rank else received
        n_turns, (unit, warps) = i32(warp_max_i32(received) * n_dst_ranks), warps_of_rank()
        n_parts = i32(max(fewest, spans.count(n_turns, warps)))
        while unit < n_turns * n_parts:
            part, number, dst_rank = push_part.unit(call.my_rank, unit, n_parts)
            row, (a, b) = i32(warp_broadcast_i32(before, dst_rank) + number), spans.span(part, n_parts)
            to = at.row(warp_broadcast_u64(windows, dst_rank), number)
            if number < warp_broadcast_i32(received, dst_rank):
                if a < b:
                    push_part.row(call.params, row, to, a, b, lane)
                if has_probs and part == 0:
                    push_prob(n_meta, call, row, to)
            unit = i32(unit + warps)

    return push_rows


def _taking(shape, address, n, take):
    """Device function (call, rows, rank, i) -> what `take` returns: of value i of rows of four ranks, `rank` first.

    address(row, i): address of one of n values. take(call, rank, at): takes the values at four addresses. Address 0
    means that nothing is awaited: this rank's own row stays in place, a rank has no such row, or i >= n.
    """
    ranks, stays = shape.n_ranks, not shape.expert_major

    @device_fn
    def awaited_at(given, rank):
        call, rows, i = given
        is_awaited = rank < ranks and not (stays and rank == call.my_rank)
        row = u64(warp_broadcast_u64(rows, rank)) if is_awaited else u64(0)
        return address(row, i) if row != u64(0) and i < n else u64(0)

    four_awaited = four(awaited_at)
    return device_fn(lambda call, rows, rank, i: take(call, rank, four_awaited((call, rows, i), rank, 1)))


def _reducing(shape):
    """Device function reduce(call, announced): does this warp's share of tokens -> whether all came.

    A warp sums 32 vectors of a token, one in each lane, over ascending ranks from +0.0, and rounds once.
    """
    ranks, row_bytes, has_probs, stays = shape.n_ranks, shape.row_bytes, shape.has_probs, not shape.expert_major
    mail, at, take, numbers = (mailbox.reading(ranks), lamport.addresses(shape), lamport.taking(wait.ROWS_COMBINE),
                               elements.make(shape.dtype))
    zero_sums, pack, n_vectors, n_runs = numbers.zeros, numbers.pack, shape.n_vectors, -(-shape.n_vectors // 32)
    add_rows, row_of = reduce.adding_rows(ranks, numbers.add, 4, stays), layout.row_of(ranks)

    take_words = device_fn(lambda call, rank, addresses: take.words(call, rank, i32(1), addresses))
    return_probs = reduce.of_probs(shape, _taking(shape, at.word, shape.n_meta, take_words), 4, stays)
    take_vectors = device_fn(lambda call, rank, addresses: take.vectors(call, rank, i32(1), u64(0), addresses))
    take_four = _taking(shape, at.vector, n_vectors, take_vectors)

    @device_fn
    def sum_run(call, rows, out, vector):
        sums, rank, ok, own = zero_sums(), i32(0), True, (u32(0), u32(0), u32(0), u32(0))
        mine = u64(warp_broadcast_u64(rows, call.my_rank)) if stays else u64(0)
        if mine != u64(0):
            own = load16(mine + u64(VECTOR) * u64(min(vector, i32(n_vectors - 1))))
        while ok and rank < ranks:
            ok, _, vectors = take_four(call, rows, rank, vector)
            sums = add_rows(sums, (call, rows, own), rank, 1, vectors)
            rank = i32(rank + 4)
        s = pack(sums)
        if ok and vector < n_vectors:
            store16(out + u64(VECTOR) * u64(vector), s[0], s[1], s[2], s[3])
        return ok

    @device_fn
    def reduce_tokens(call, announced):
        params, lane, (_, before), ok = call.params, i32(lane_id()), mail.received(announced, call.my_rank), True
        windows = at.rows(at.of(params, call.my_rank, lane), call.epoch) if lane < ranks else u64(0)
        unit, warps = warps_of_rank()
        while ok and unit < call.num_tokens * n_runs:
            (token, run), rows = split(unit, n_runs), u64(0)
            row = i32(row_of(params[p.row_of], token, lane))
            if row >= 0:
                rows = at.row(windows, row)
                if stays and lane == call.my_rank:      # it lies in x, in the order received
                    row = i32(row + before)
                    rows = u64(params[p.x] + u64(row) * u64(row_bytes))
            ok = sum_run(call, rows, params[p.out] + u64(token) * u64(row_bytes), i32(32 * run + lane))
            if ok and has_probs and run == 0:
                ok = return_probs(call, rows, token, i32(warp_broadcast_i32(row, call.my_rank)), lane)
            unit = i32(unit + warps)
        return ok

    return reduce_tokens


def combining(shape, mark):
    """`small` for announce.beginning: every block but the leader block pushes and then reduces."""
    push_rows, reduce_rows = _pushing(shape), _reducing(shape)

    @device_fn
    def push_and_reduce(call, announced, prepared):
        push_rows(call, announced)
        mark(call.params, stamps.SENT)
        reduce_rows(call, announced)
        mark(call.params, stamps.REDUCED)

    return lamport.call_with_handle(shape, wait.ROWS_COMBINE, mark, device_fn(lambda call: None), push_and_reduce)
