"""Expansion copies received rows (src_rank, token) to rows by local expert, and writes zeros in padding rows. Local.

If all rows have come, a kernel after the dispatch expands them. Otherwise the dispatch itself expands each part of a
row when its flag is up.
"""

from functools import lru_cache

from epmoe.device import (ballot, block_idx, device_fn, grid_dim, i32, kernel, lane_id, load_i32, load_u32, n_warps,
                          popc, shfl_idx, st_release_gpu_i32, store_i32, store_u32, syncwarp,
                          thread_idx, u32, u64, warp_broadcast_i32, warp_broadcast_u64, warp_id, warp_inclusive_sum_i32)

from ..bits import below, but_lowest, has, largest, lowest, split
from ..formats.row_copy import clear_padding
from ..params import CACHED, VECTOR, word_in
from . import call as calls
from . import layout, mailbox, send, wait
from .copy import BATCH, copying, parts
from .shape import BLOCK, p


def _expert_rows(shape):
    """Device function (params, received, first, before, writes, lane), called by a warp: a received row's output rows.

    received: (row, its src_rank). before: how many experts below `first` have the row. Returns ((output row, place) for
    expert first + lane, the same for expert first + 32 + lane, `before` of the next experts). Output row: -1 for none.
    place: index of the expert among the numbers that came with the row. Without has_meta output rows are read from the
    handle. With it, they are looked up by the numbers that came with the row, and written to the handle if `writes`.
    Loads for both windows of experts are issued together.
    """
    n_local, has_meta, n_masks = shape.num_local_experts, shape.has_meta, send.expert_masks(shape.num_local_experts)

    @device_fn
    def known_row(params, row, expert):
        return i32(load_i32(word_in(params[p.expert_row], row, n_local, expert))) if expert < n_local else i32(-1)

    @device_fn
    def mask_of(params, row, window):
        return u32(load_u32(word_in(params[p.source_masks], row, n_masks, window))) if window < n_masks else u32(0)

    @device_fn
    def look_up(params, received, expert, place, is_here):
        """(number among the rows of its src_rank for the expert, where these begin). Does not wait for the loads."""
        number_at = word_in(params[p.source_numbers], received[0], n_local, place)
        begin_at = params[p.expert_base] + u64(4) * u64(received[1] * n_local + expert)
        return (i32(load_i32(number_at)), i32(load_i32(begin_at))) if is_here else (i32(0), i32(0))

    @device_fn
    def row_if_kept(params, row, expert, found, is_here, writes):
        """The output row. From num_rows on, rows are dropped, now and in every later call."""
        is_kept = is_here and found[0] + found[1] < i32(params[p.num_rows])
        target = i32(found[0] + found[1]) if is_kept else i32(-1)
        if writes and expert < n_local:
            store_i32(word_in(params[p.expert_row], row, n_local, expert), target)
        return target

    @device_fn
    def expert_rows(params, received, first, before, writes, lane):
        row, a, b = received[0], i32(first + lane), i32(first + 32 + lane)
        if not has_meta:
            return (known_row(params, row, a), i32(0)), (known_row(params, row, b), i32(0)), i32(0)
        window = i32(u32(first) // u32(32))
        here_a, here_b = mask_of(params, row, window), mask_of(params, row, i32(window + 1))
        is_a, is_b = has(here_a, lane), has(here_b, lane)
        before_b = i32(before + popc(here_a))
        place_a = i32(before + popc(u32(here_a & below(lane))))
        place_b = i32(before_b + popc(u32(here_b & below(lane))))
        of_a, of_b = look_up(params, received, a, place_a, is_a), look_up(params, received, b, place_b, is_b)
        row_a = row_if_kept(params, row, a, of_a, is_a, writes)
        row_b = row_if_kept(params, row, b, of_b, is_b, writes)
        return (row_a, place_a), (row_b, place_b), i32(before_b + popc(here_b))

    return expert_rows


def recorded_rows(shape):
    """Device function (params, expert) -> (the expert's first row, how many rows hold tokens), from the handle."""
    n_local = shape.num_local_experts
    return device_fn(lambda params, expert: (i32(load_i32(params[p.expert_rows] + u64(4) * u64(expert))),
                                             i32(load_i32(params[p.expert_rows] + u64(4) * u64(n_local + expert)))))


def clearing(shape, rows_of):
    """Device function (params, known, me, warps, lane): zeroes padding rows, and rows after the last expert's rows.

    It does the share of warp `me` of `warps`. rows_of(known, expert): as in recorded_rows.
    """
    n_local, has_probs, row_bytes = shape.num_local_experts, shape.has_probs, VECTOR * shape.n_vectors
    scale_bytes = 4 * shape.scale_words if shape.encode else 0
    clear_values, clear_scales = clear_padding(row_bytes), clear_padding(scale_bytes)

    @device_fn
    def clear_rows(params, known, me, warps, lane):
        window, num_rows = i32(0), i32(params[p.num_rows])
        while window < n_local:                 # a lane an expert: rows between its tokens' and the next expert's
            first, end, expert = i32(0), i32(0), i32(window + lane)
            if expert < n_local:
                start, n = rows_of(known, expert)
                end = rows_of(known, i32(expert + 1))[0] if expert < n_local - 1 else num_rows
                first, end = i32(start + n), i32(min(end, num_rows))
            left = u32(ballot(first < end))
            while left != u32(0):
                row, behind = i32(warp_broadcast_i32(first, lowest(left))), i32(warp_broadcast_i32(end, lowest(left)))
                row = i32(row + u32(i32(me + warps) - i32(u32(row) % u32(warps))) % u32(warps))
                while row < behind:
                    clear_values(params[p.out] + u64(row) * u64(row_bytes), lane)
                    clear_scales(params[p.out_scales] + u64(row) * u64(scale_bytes), lane)
                    if has_probs and lane == 0:
                        store_u32(params[p.out_probs] + u64(4) * u64(row), u32(0))
                    row = i32(row + warps)
                left = but_lowest(left)
            window = i32(window + 32)

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
    def copy_scales(params, src, target, mask, start, end, lane):
        """Copies the scales of the vectors [start, end)."""
        left, scales = u32(mask), params[p.out_scales]
        while left != u32(0):
            to = scales + u64(4) * u64(warp_broadcast_i32(target, lowest(left))) * u64(n_scales)
            i = i32(start // send.A_SCALE + lane)
            while i < n_scales and send.A_SCALE * i < end:
                store_u32(to + u64(4) * u64(i), load_u32(src + u64(out_bytes) + u64(4) * u64(i)))
                i = i32(i + 32)
            left = but_lowest(left)

    @device_fn
    def expand_probs(params, row, target, place):
        if target >= 0:
            value = load_u32(word_in(params[p.source_probs], row, n_local, place))
            store_u32(params[p.out_probs] + u64(4) * u64(target), value)

    @device_fn
    def expand_row(params, received, src, start, end, is_first, lane):
        row, out = received[0], params[p.out]
        first, before = i32(0), i32(0)
        while first < n_local:                    # two windows of experts
            batch = rows.load(src, start, end, lane)        # on its way while their rows are looked up
            (a, place_a), (b, place_b), before = expert_rows(params, received, first, before, is_first, lane)
            mask_a, mask_b, base = u32(ballot(a >= 0)), u32(ballot(b >= 0)), i32(start)
            while base < end:
                if base > start:
                    batch = rows.load(src, base, end, lane)
                rows.store(batch, out + u64(a) * u64(out_bytes), mask_a, i32(0), base, end, lane)
                rows.store(batch, out + u64(b) * u64(out_bytes), mask_b, i32(0), base, end, lane)
                base = i32(base + BATCH)
            if is_first and has_probs:
                expand_probs(params, row, a, place_a)
                expand_probs(params, row, b, place_b)
            if n_scales > 0:
                copy_scales(params, src, a, mask_a, start, end, lane)
                copy_scales(params, src, b, mask_b, start, end, lane)
            first = i32(first + 64)

    return expand_row


def arriving(shape, flags, numbered):
    """Device function expand_rows(call, announced) -> whether all rows came. All warps call it; senders after sending.

    Warps claim a few parts of rows at a time and expand them as they come. flags: of copy.py. numbered: of send.make.
    """
    ranks, has_meta, mail = shape.n_ranks, shape.has_meta, mailbox.reading(shape.n_ranks)
    from_input, row_of, row_bytes = send.keeps_own_rows(shape), layout.row_of(ranks), shape.row_bytes
    is_numbered_now, src_bytes = numbered is not None, shape.src_bytes
    expand_row, clear_rows = of_row(shape), clearing(shape, recorded_rows(shape))
    claim, spans = calls.claims(mailbox.NEXT_TO_RECEIVE), parts(shape.n_vectors)
    most_at_once, most_looks = shape.tuning.expand_at_once, shape.tuning.expand_looks

    @device_fn
    def row_here(call, src_rank, number, first, n_rows):
        """(row, or -1 for none; its address) of the number-th row of a src_rank, or number-th token of this rank."""
        row = i32(first + number) if number < n_rows else i32(-1)
        if not from_input or src_rank != call.my_rank:
            return row, u64(call.params[p.sources] + u64(row) * u64(row_bytes))
        mine = row_of(call.params[p.row_of], number, src_rank) if number < call.num_tokens else i32(-1)
        return (i32(first + mine) if mine >= 0 else i32(-1)), u64(call.params[p.x] + u64(number) * u64(src_bytes))

    @device_fn
    def expand_parts(call, rows, n_parts, left, lane):
        """Expands the parts in `left` as their flags rise. rows: (row, address, part, src_rank) of part i in lane i."""
        (row, src, part, src_rank), here, looks, ok = rows, u32(left), i32(0), True
        awaited = i32(0) if from_input and src_rank == call.my_rank else i32(part)
        while ok and here != u32(0):
            # a row's metadata comes with its first part
            is_up = has(here, lane) and flags.is_up(call, row, awaited) and flags.is_up(call, row, i32(0))
            up, looks = u32(ballot(is_up)), i32(looks + 1)
            if up == u32(0) and looks % most_looks == 0:
                first = row if lane == lowest(here) else i32(-1)
                ok = flags.wait_for(call, first, awaited, src_rank) and flags.wait_for(call, first, i32(0), src_rank)
            syncwarp()                          # what one lane acquired, all lanes read
            while up != u32(0):
                one = lowest(up)
                its_part, at = i32(warp_broadcast_i32(part, one)), u64(warp_broadcast_u64(src, one))
                received = i32(warp_broadcast_i32(row, one)), i32(warp_broadcast_i32(src_rank, one))
                a, b = spans.span(its_part, n_parts)
                if a < b:                       # the last parts of long rows may be empty
                    expand_row(call.params, received, at, a, b, its_part == 0, lane)
                up, here = but_lowest(up), u32(here & ~(u32(1) << u32(one)))
        return ok

    @device_fn
    def expand_rows(call, announced):
        lane, (here, before), n_parts = i32(lane_id()), mail.received(announced, call.my_rank), flags.count(announced)
        if has_meta:                            # experts' rows begin where the leader block has written
            at = call.params[p.words] + u64(mailbox.RECORDED)
            if calls.is_leader() and thread_idx() == 0:     # a barrier of it lies behind the last store
                st_release_gpu_i32(at, i32(call.epoch))
            if not wait.in_warp(lane != 0 or wait.for_blocks(call.params, at, i32(call.epoch), wait.ROWS_DISPATCH)):
                return False
        if from_input and is_numbered_now and not numbered.wait_for(call, lane):
            return False
        me, warps = i32(warp_id() * grid_dim() + block_idx()), i32(n_warps() * grid_dim())
        clear_rows(call.params, call.params, me, warps, lane)
        most = i32(max(largest(here), call.num_tokens)) if from_input else largest(here)
        n_units = i32(most * ranks * n_parts)
        at_once = i32(max(1, min(most_at_once, i32(u32(n_units) // u32(i32(n_warps() * grid_dim()))))))
        batch, ok = claim(call, lane), True
        while ok and batch * at_once < n_units:
            following = claim(call, lane)
            # lane i has the i-th part of a row; rows of all ranks are expected to come side by side
            turn, part = split(i32(batch * at_once + lane), n_parts)
            number = i32(u32(turn) // u32(ranks))
            src_rank = i32(u32(i32(call.my_rank + turn)) % u32(ranks))
            first, n_rows = i32(shfl_idx(before, src_rank)), i32(shfl_idx(here, src_rank))
            row, src = row_here(call, src_rank, number, first, n_rows)
            left = u32(ballot(lane < at_once and row >= 0))
            ok = expand_parts(call, (row, src, part, src_rank), n_parts, left, lane)
            batch = i32(following)
        return ok

    return expand_rows


@lru_cache(CACHED)
def expand_kernel(shape):
    """Makes the kernel that expands received rows after they have all come, if the dispatch itself does not expand."""
    ranks, expand_row, spans, row_bytes = shape.n_ranks, of_row(shape), parts(shape.n_vectors), shape.row_bytes
    clear_rows = clearing(shape, recorded_rows(shape))

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_expand(params, num_tokens, my_rank):
        lane = i32(lane_id())
        counts = params[p.counts] + u64(4) * u64(my_rank)
        here = i32(load_i32(counts + u64(4) * u64(lane * ranks))) if lane < ranks else i32(0)
        ends = i32(warp_inclusive_sum_i32(here))        # of the rows from the ranks up to `lane`
        n_rows = i32(warp_broadcast_i32(ends, i32(ranks - 1)))
        me, warps = i32(warp_id() * grid_dim() + block_idx()), i32(n_warps() * grid_dim())
        n_parts, unit = spans.count(n_rows, warps), i32(me)
        while unit < n_rows * n_parts:
            row, part = split(unit, n_parts)
            src_rank = lowest(u32(ballot(lane < ranks and ends > row)))
            a, b = spans.span(part, n_parts)
            src = u64(params[p.sources] + u64(row) * u64(row_bytes))
            expand_row(params, (row, src_rank), src, a, b, part == 0, lane)
            unit = i32(unit + warps)
        clear_rows(params, params, me, warps, lane)

    return rows_expand
