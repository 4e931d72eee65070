"""Pushes rows back to their tokens' ranks. Expert-major rows are first summed over local experts."""

from epmoe.device import (device_fn, grid_dim, i32, lane_id, load_i32, load_u32, store16, store_u32, u32, u64,
                          warp_broadcast_i32, warp_broadcast_u64, warp_max_i32)

from ..bits import around, split
from ..params import by_lanes
from . import call as calls
from . import mailbox, reduce
from .copy import copying, parts
from .shape import arrays, namespace, p


def n_dst_ranks_of(shape):
    """Number of ranks that a rank pushes rows to."""
    return shape.n_ranks - (not shape.expert_major)


def part_pushing(shape, store=store16):
    """Namespace of device functions by which a warp pushes one part of a row.

    unit(my_rank, unit, n_parts) -> (part, row's number among those for a rank, that rank) of a unit of work. First come
    the first rows of all ranks, so that tokens become complete one after another. row(params, row, to, first, end,
    lane): stores vectors [first, end) of this rank's row number `row` to the row at `to` by `store`. prob(params, row,
    i): its i-th prob (bits).
    """
    ranks, row_bytes, n_meta = shape.n_ranks, shape.row_bytes, shape.n_meta
    expert_major, n_dst_ranks = shape.expert_major, max(n_dst_ranks_of(shape), 1)
    rows = copying(read_only=True, store=store)
    if expert_major:
        sum_row = reduce.sum_of_experts(shape, store)

    @device_fn
    def unit_of(my_rank, unit, n_parts):
        turn, part = split(unit, n_parts)
        number, step = split(turn, n_dst_ranks)
        return part, number, around(i32(my_rank + 1 + step), ranks)

    @device_fn
    def push_row(params, row, to, first, end, lane):
        if expert_major:
            sum_row(params, row, to, first, end, lane)
        else:
            rows.copy(params[p.x] + u64(row) * u64(row_bytes), to, u32(1), i32(0), first, end, lane)

    @device_fn
    def prob(params, row, i):
        """The row's i-th prob; expert-major: the prob of the row of its i-th local expert, 0 if there is none."""
        at, there = u64(row) * u64(n_meta) + u64(i), True
        if expert_major:
            expert_row = i32(load_i32(params[p.expert_row] + u64(4) * at))
            at, there = u64(expert_row), expert_row >= 0
        return u32(load_u32(params[p.probs] + u64(4) * at)) if there else u32(0)

    return namespace("push", unit=unit_of, row=push_row, prob=prob)


def make(shape, flags):
    """Device function push(call, announced): pushes rows of x, except those of own tokens; in expert-major, all sums.

    Each row goes to the rank of its token, dst_rank. There, rows from lower ranks come first, and those of a rank keep
    their order. Warps claim parts of rows; if there are few blocks, whole rows. flags: of copy.py.
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    mail, claim, push_part = mailbox.reading(ranks), calls.claims(mailbox.NEXT_TO_SEND), part_pushing(shape)
    stays, n_dst_ranks, spans = not shape.expert_major, n_dst_ranks_of(shape), parts(shape.n_vectors)
    push_prob = by_lanes(lambda i, params, row, to: store_u32(to + u64(4) * u64(i), push_part.prob(params, row, i)))
    many_blocks = shape.tuning.many_blocks  # with fewer, warps push whole rows: they wait less often for a release

    @device_fn
    def push(call, announced):
        params, lane, (received, before) = call.params, i32(lane_id()), mail.received(announced, call.my_rank)
        first_row = mail.returned_before_me(announced, call.my_rank)
        rows_at = mail.array_at(params, announced, arrays.rows, lane) if lane < ranks else u64(0)
        probs_at = mail.array_at(params, announced, arrays.row_probs, lane) if lane < ranks else u64(0)
        received = i32(0) if stays and lane == call.my_rank else received
        n_parts, whole_rows = flags.n_parts(announced), grid_dim() < many_blocks
        units_of_row = i32(1) if whole_rows else i32(n_parts)
        unit, n_units = claim(call, lane), i32(warp_max_i32(received) * n_dst_ranks * units_of_row)
        while unit < n_units:
            following = claim(call, lane)
            part, number, dst_rank = push_part.unit(call.my_rank, unit, units_of_row)
            row = i32(warp_broadcast_i32(before, dst_rank) + number)
            if number < warp_broadcast_i32(received, dst_rank):
                to_row = i32(warp_broadcast_i32(first_row, dst_rank) + number)
                to, (a, b) = u64(warp_broadcast_u64(rows_at, dst_rank)), spans.span(part, units_of_row)
                push_part.row(params, row, u64(to + u64(to_row) * u64(row_bytes)), a, b, lane)
                if has_probs and part == 0:
                    to_probs = u64(warp_broadcast_u64(probs_at, dst_rank)) + u64(4) * u64(to_row) * u64(n_meta)
                    push_prob(n_meta, params, row, to_probs)
                flags.raise_at(call, dst_rank, to_row, part, i32(n_parts if whole_rows else part + 1), lane)
            unit = i32(following)

    return push
