"""Moving rows out of windows to the places where they stay, while others are still on their way."""

from epmoe.device import (ballot, block_idx, device_fn, ffs, i32, lane_id, load_u32, n_warps, store_u32, u32, u64,
                          warp_broadcast_i32, warp_broadcast_u64, warp_id, warp_inclusive_sum_i32)

from . import control, peers, roles, windows
from .row_copy import VECTOR, copy_to_lanes, parts
from .senders import apart


def make(shape, block, few):
    """Device function move(params, epoch, my_rank, notes) -> whether all rows came; of blocks that send, when they have.

    Rows of source ranks that are not few are left alone: these write where they stay. few: of windows.
    """
    ranks, row_bytes, n_apart = shape.n_ranks, shape.row_bytes, apart(shape)
    n_words, n_vectors, sending = control.experts_at(ranks), shape.row_bytes // VECTOR, roles.sending(shape)
    place, (_, _, _, received, _) = peers.place_in(block, ranks), peers.sums(ranks)
    (count_parts, part_span), copy = parts(n_vectors), copy_to_lanes(read_only=False)
    more = [(windows.META, 2 * shape.top_k * shape.has_meta), (windows.PROBS, shape.top_k * shape.has_probs),
            (windows.SCALES, shape.scale_words)]

    def mover(index, words):
        """Device function that moves a row's words of one array, or nothing."""
        window_at = few.at[index]

        @device_fn
        def move_words(params, notes, epoch, my_rank, source, number, row, lane):
            i = i32(lane)
            src = u64(window_at(params, epoch, my_rank, source) + u64(4 * words) * u64(number))
            to = u64(place(params, notes, i32(index), my_rank) + u64(4 * words) * u64(row))
            while i < words:
                store_u32(to + u64(4) * u64(i), load_u32(src + u64(4) * u64(i)))
                i = i32(i + 32)

        @device_fn
        def nothing(params, notes, epoch, my_rank, source, number, row, lane):
            return

        return move_words if words else nothing

    move_meta, move_probs, move_scales = (mover(*what) for what in more)
    window_of_rows, are_few, await_flag = few.at[windows.X], few.are_few, few.await_flag

    @device_fn
    def move(params, epoch, my_rank, notes):
        lane, here = i32(lane_id()), i32(0)
        if lane < ranks and are_few(i32(notes[lane * n_words + control.TOKENS])):
            here = i32(notes[lane * n_words + control.COUNTS + my_rank])
        ends, stays = i32(warp_inclusive_sum_i32(here)), i32(received(notes, my_rank) - here)
        rows_at, src = place(params, notes, i32(windows.X), my_rank), u64(0)
        if lane < ranks:
            src = window_of_rows(params, epoch, my_rank, lane)
        n_rows, warps = i32(warp_broadcast_i32(ends, i32(ranks - 1))), i32(n_warps() * sending())
        n_parts = count_parts(n_rows, warps)
        units, unit, ok = i32(n_parts + n_apart), i32(warp_id() * sending() + block_idx()), True
        while ok and unit < n_rows * units:
            one, part = i32(unit // units), i32(unit % units)
            source = i32(ffs(u32(ballot(lane < ranks and ends > one))) - 1)
            number = i32(one - warp_broadcast_i32(i32(ends - here), source))
            row, awaited = i32(warp_broadcast_i32(stays, source) + number), i32(-1)
            if lane == 0:
                awaited = number
            ok = await_flag(params, epoch, my_rank, source, awaited, i32(0))
            if ok:
                a, b = part_span(part, n_parts)     # none behind the last part
                copy(u64(warp_broadcast_u64(src, source)) + u64(number) * u64(row_bytes),
                     u64(rows_at + u64(row) * u64(row_bytes)), u32(1), i32(0), a, b, lane)
                if part == n_parts * n_apart:
                    move_meta(params, notes, epoch, my_rank, source, number, row, lane)
                    move_probs(params, notes, epoch, my_rank, source, number, row, lane)
                    move_scales(params, notes, epoch, my_rank, source, number, row, lane)
            unit = i32(unit + warps)
        return ok

    return move
