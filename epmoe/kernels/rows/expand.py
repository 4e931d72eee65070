"""Expansion copies received rows (src_rank, token) to rows by local expert, and writes zeros in padding rows.

All this is in a rank's own memory. Each part of a row is expanded when its flag is up. Of a rank's rows to itself that
stay in the input, only the flag of part 0 is awaited: their metadata come with it.
"""

from epmoe.device import (ballot, block_idx, device_fn, grid_dim, i32, lane_id, load_i32, load_u32, n_warps,
                          st_release_gpu_i32, store_i32, store_u32, syncwarp, thread_idx, u32, u64, warp_broadcast_i32,
                          warp_id, warp_max_i32)

from ..bits import around, but_lowest, divided, divided_up, has, in_fours, lowest, split
from ..formats.row_copy import clear_padding
from ..params import VECTOR, word_in
from . import call as calls
from . import handle, layout, mailbox, send, wait
from .copy import BATCH, copying, parts
from .shape import NO_LIMIT, p


def _expert_rows(shape):
    """Device function (params, received, first, is_first, lane) -> (output row, number of experts), called by a warp.

    Lane i gets the output row of the (first + i)-th of a received row's experts in ascending order; -1 if there is
    none, or if that output row is dropped. received: (row, its src_rank). With has_meta output rows follow from the
    numbers that came with the row, and are written to the handle if is_first. Without it, they are read from the
    handle, and experts with a dropped row are not counted.
    """
    n_local, has_meta, n_masks = shape.num_local_experts, shape.has_meta, send.expert_masks(shape.num_local_experts)

    @device_fn
    def load_window(given, window):
        """(bits of the row's experts in a window of 32, without has_meta the output row of the lane's expert)"""
        (params, row, lane, _, _), bits, known = given, u32(0), i32(-1)
        expert = i32(32 * window + lane)
        if has_meta:
            if window < n_masks:
                bits = u32(load_u32(word_in(params[p.source_masks], row, n_masks, window)))
        else:                                   # no branch of a lane before a vote
            known = i32(load_i32(word_in(params[p.expert_row], row, n_local, min(expert, n_local - 1))))
        return bits, known if expert < n_local else i32(-1)

    @device_fn
    def find_in_window(found, given, window, loaded):
        """found: how many experts earlier windows have, and the lane's expert, or its output row without has_meta."""
        (n, mine), (params, row, lane, first, writes), (bits, known) = found, given, loaded
        expert = i32(32 * window + lane)
        if not has_meta:
            bits = u32(ballot(known >= 0))
        elif writes and expert < n_local and not has(bits, lane):       # the row does not go to this expert
            store_i32(word_in(params[p.expert_row], row, n_local, expert), i32(-1))
        while bits != u32(0):
            one = i32(32 * window + lowest(bits)) if has_meta else i32(warp_broadcast_i32(known, lowest(bits)))
            mine = one if n == first + lane else mine
            n, bits = i32(n + 1), but_lowest(bits)
        return n, mine

    find = in_fours(load_window, find_in_window)

    @device_fn
    def expert_rows(params, received, first, is_first, lane):
        (row, src_rank), writes = received, is_first and first == 0
        n, mine = find((i32(0), i32(-1)), (params, row, lane, first, writes), i32(0), 1, i32(n_masks))
        if has_meta and mine >= 0:
            expert, out_row = mine, i32(-1)
            begin_at = params[p.expert_base] + u64(4) * u64(src_rank * n_local + expert)
            number, begin = load_i32(word_in(params[p.source_numbers], row, n_local, first + lane)), load_i32(begin_at)
            if i32(number) + i32(begin) < i32(params[p.num_rows]):      # the others are dropped, in later calls too
                out_row = i32(i32(number) + i32(begin))
            if is_first:
                store_i32(word_in(params[p.expert_row], row, n_local, expert), out_row)
            mine = out_row
        syncwarp()      # or the caller's vote at times counts lanes apart ("Lanes meet" in benchmarks/notes/rows.md)
        return mine, n

    return expert_rows


def recorded_rows(shape):
    """Device function (params, expert) -> (the expert's first row, how many rows hold tokens), from the handle."""
    n_local = shape.num_local_experts
    return device_fn(lambda params, expert: (i32(load_i32(params[p.expert_rows] + u64(4) * u64(expert))),
                                             i32(load_i32(params[p.expert_rows] + u64(4) * u64(n_local + expert)))))


def clearing(shape, rows_of):
    """Device function (params, known, me, warps, lane): zeroes padding rows, and rows up to num_rows after the last.

    It does the share of warp `me` of `warps`: some warps for each 32 experts. rows_of(known, expert): as recorded_rows.
    """
    n_local, has_probs, row_bytes = shape.num_local_experts, shape.has_probs, VECTOR * shape.n_vectors
    scale_bytes, n_windows = 4 * shape.scale_words if shape.encode else 0, -(-n_local // 32)
    clear_values, clear_scales = clear_padding(row_bytes), clear_padding(scale_bytes)

    @device_fn
    def clear_rows(params, known, me, warps, lane):
        num_rows, pad, team = i32(params[p.num_rows]), i32(params[p.pad_multiple]), i32(max(1, divided(warps, n_windows)))
        window, me = split(me, team)
        while window < n_windows:               # a lane an expert: rows between its tokens' and the next expert's
            first, end, expert = i32(0), i32(0), i32(32 * window + lane)
            if expert < n_local:
                start, n = rows_of(known, expert)
                is_rest = expert == n_local - 1 and num_rows != NO_LIMIT
                end = num_rows if is_rest else i32(min(start + divided_up(n, pad) * pad, num_rows))
                first = i32(start + n)
            left = u32(ballot(first < end))
            while left != u32(0):
                row, stop = i32(warp_broadcast_i32(first, lowest(left))), i32(warp_broadcast_i32(end, lowest(left)))
                row = i32(row + u32(i32(me + team) - i32(u32(row) % u32(team))) % u32(team))
                while row < stop:
                    clear_values(params[p.out] + u64(row) * u64(row_bytes), lane)
                    clear_scales(params[p.out_scales] + u64(row) * u64(scale_bytes), lane)
                    if has_probs and lane == 0:
                        store_u32(params[p.out_probs] + u64(4) * u64(row), u32(0))
                    row = i32(row + team)
                left = but_lowest(left)
            window = i32(window + divided(warps, team))

    return clear_rows


def of_row(shape):
    """Device function expand_row(params, received, src, start, end, is_first, lane), called by a warp.

    It copies the 16-byte vectors [start, end) of a received row at src, and their scales, to the rows of its experts;
    if is_first, its metadata, too. received: (row, its src_rank). params `sources`: metadata that came with the rows.
    has_meta: it writes the handle's expert_row, otherwise it reads it. encode: rows are blockwise FP8 messages; their
    scales go to out_scales [P, scale_words].
    """
    n_local, has_probs = shape.num_local_experts, shape.has_probs
    out_bytes, n_scales = shape.n_vectors * VECTOR, shape.scale_words if shape.encode else 0
    expert_rows, rows = _expert_rows(shape), copying(read_only=False)

    @device_fn
    def copy_scales(params, src, out_row, mask, start, end, lane):
        """Copies the scales of the vectors [start, end)."""
        left, scales = u32(mask), params[p.out_scales]
        while left != u32(0):
            to = scales + u64(4) * u64(warp_broadcast_i32(out_row, lowest(left))) * u64(n_scales)
            i = i32(start // send.A_SCALE + lane)
            while i < n_scales and send.A_SCALE * i < end:
                store_u32(to + u64(4) * u64(i), load_u32(src + u64(out_bytes) + u64(4) * u64(i)))
                i = i32(i + 32)
            left = but_lowest(left)

    @device_fn
    def expand_probs(params, row, out_row, number):
        if out_row >= 0:
            value = load_u32(word_in(params[p.source_probs], row, n_local, number))
            store_u32(params[p.out_probs] + u64(4) * u64(out_row), value)

    @device_fn
    def expand_row(params, received, src, start, end, is_first, lane):
        first, n = i32(0), i32(1)
        while first < n:                          # 32 of the row's experts
            batch = rows.load(src, start, end, lane)        # on its way while their rows are looked up
            out_row, n = expert_rows(params, received, first, is_first, lane)
            mask, base, to = u32(ballot(out_row >= 0)), i32(start), params[p.out] + u64(out_row) * u64(out_bytes)
            while base < end:
                if base > start:
                    batch = rows.load(src, base, end, lane)
                rows.store(batch, to, mask, i32(0), base, end, lane)
                base = i32(base + BATCH)
            if is_first and has_probs:
                expand_probs(params, received[0], out_row, i32(first + lane))
            if n_scales > 0:
                copy_scales(params, src, out_row, mask, start, end, lane)
            first = i32(first + 32)

    return expand_row


def arriving(shape, flags, numbered):
    """Device function expand_rows(call, announced) -> whether all rows came. All warps call it; senders after sending.

    Warps claim parts of rows, and expand each when it has come. If rows by expert are more than `out_rows`, it does
    nothing. flags: of copy.py. numbered: see send.make.
    """
    ranks, has_meta, mail = shape.n_ranks, shape.has_meta, mailbox.reading(shape.n_ranks)
    from_input, row_of, row_bytes = send.expands_own_from_input(shape), layout.row_of(ranks), shape.row_bytes
    is_numbered_now, src_bytes = numbered is not None, shape.src_bytes
    expand_row, clear_rows = of_row(shape), clearing(shape, recorded_rows(shape))
    claim, spans = calls.claims(mailbox.NEXT_TO_RECEIVE), parts(shape.n_vectors)

    @device_fn
    def row_here(call, src_rank, number, first, n_rows):
        """(row, address) of row `number` from a src_rank, or of this rank's token `number` in x. row: -1 for none."""
        row = i32(first + number) if number < n_rows else i32(-1)
        if not from_input or src_rank != call.my_rank:
            return row, u64(call.params[p.sources] + u64(row) * u64(row_bytes))
        mine = row_of(call.params[p.row_of], number, src_rank) if number < call.num_tokens else i32(-1)
        return (i32(first + mine) if mine >= 0 else i32(-1)), u64(call.params[p.x] + u64(number) * u64(src_bytes))

    @device_fn
    def expand_rows(call, announced):
        lane, n_parts = i32(lane_id()), flags.n_parts(announced)
        received, before = mail.received(announced, call.my_rank)
        if has_meta:                            # the leader block has written where experts' rows begin
            at = call.params[p.words] + u64(mailbox.RECORDED)
            if calls.is_leader() and thread_idx() == 0:     # its stores precede its last barrier
                st_release_gpu_i32(at, i32(call.epoch))
            if not wait.in_warp(lane != 0 or wait.for_blocks(call.params, at, i32(call.epoch), wait.ROWS_DISPATCH)):
                return False
            if load_i32(call.params[p.info] + u64(4 * handle.PADDED_ROWS)) > i32(call.params[p.out_rows]):
                return True
        if from_input and is_numbered_now and not numbered.wait_for(call, lane):
            return False
        me, warps = i32(warp_id() * grid_dim() + block_idx()), i32(n_warps() * grid_dim())
        clear_rows(call.params, call.params, me, warps, lane)
        most = i32(max(warp_max_i32(received), call.num_tokens)) if from_input else warp_max_i32(received)
        unit, ok = claim(call, lane), True
        while ok and unit < most * ranks * n_parts:
            following = claim(call, lane)
            turn, part = split(unit, n_parts)       # the ranks' rows are expected to come at the same time
            number, step = split(turn, ranks)
            src_rank = around(i32(call.my_rank + step), ranks)
            first, n_rows = i32(warp_broadcast_i32(before, src_rank)), i32(warp_broadcast_i32(received, src_rank))
            row, src = row_here(call, src_rank, number, first, n_rows)
            if row >= 0:
                # lane 1 waits for the first part, with which the row's metadata comes
                travels = not (from_input and src_rank == call.my_rank)
                awaited = i32(part) if travels and lane == 0 else i32(0)
                its_row = i32(row) if lane < 2 else i32(-1)
                ok, (a, b) = flags.wait_for(call, its_row, awaited, src_rank), spans.span(part, n_parts)
                if ok and a < b:                    # the last parts of long rows may be empty
                    expand_row(call.params, (row, src_rank), src, a, b, part == 0, lane)
            unit = i32(following)
        return ok

    return expand_rows
