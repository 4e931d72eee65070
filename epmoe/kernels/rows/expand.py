"""Expansion: from received rows (src_rank, token) to rows by local expert, with zeros where there is no token. Local."""

from functools import lru_cache

from epmoe.device import (ballot, block_idx, device_fn, ffs, grid_dim, i32, kernel, lane_id, load_i32, load_u32,
                          n_warps, popc, store16, store_i32, store_u32, u32, u64, warp_broadcast_i32, warp_id,
                          warp_inclusive_sum_i32)

from . import companions
from .block import parameter_block
from .row_copy import BATCH, VECTOR, copy_to_lanes, parts
from .senders import A_SCALE, vectors_of

CACHED = 128


def _expert_rows(shape, block):
    """Device function (params, row, source, first, before, writes, lane) for experts of a received row, by a warp.

    -> ((output row, place) of expert first + lane, the same of expert first + 32 + lane, `before` of the next ones).
    Output row: -1 for none. place: among the numbers that came with the row. before: how many of the experts before
    `first` have the row. Out of the handle; where places of local experts came with the row (has_meta), out of these,
    and into the handle if `writes`. What is looked up for both windows of experts is asked for together.
    """
    local, has_meta, n_masks = shape.n_local_experts, shape.has_meta, companions.expert_masks(shape.n_local_experts)
    p_known, p_base, p_rows, p_sources = (block.index(n) for n in ("expert_row", "expert_base", "n_rows", "sources"))
    p_slots, p_masks = p_sources + 1, p_sources + 3

    @device_fn
    def known_at(params, row, expert):
        return params[p_known] + u64(4) * (u64(row) * u64(local) + u64(expert))

    @device_fn
    def known_row(params, row, expert):
        target = i32(-1)
        if expert < local:
            target = i32(load_i32(known_at(params, row, expert)))
        return target

    @device_fn
    def mask_of(masks, row, window):
        mask = u32(0)
        if window < n_masks:
            mask = u32(load_u32(masks + u64(4) * (u64(row) * u64(n_masks) + u64(window))))
        return mask

    @device_fn
    def place_in(here, before, lane):
        return i32(before + popc(u32(here & u32(u32(u32(1) << u32(lane)) - u32(1)))))

    @device_fn
    def look_up(slots, base, row, source, expert, place, is_here):
        """(the row's number among those of its source for the expert, where these begin), not waited for."""
        slot, begin = i32(0), i32(0)
        if is_here:
            slot = i32(load_i32(slots + u64(4) * (u64(row) * u64(local) + u64(place))))
            begin = i32(load_i32(base + u64(4) * u64(source * local + expert)))
        return slot, begin

    @device_fn
    def noted(params, row, expert, found, limit, is_here, writes):
        """The output row; without room it is dropped, from here on and in every later call."""
        target = i32(-1)
        if is_here and found[0] + found[1] < limit:
            target = i32(found[0] + found[1])
        if writes and expert < local:
            store_i32(known_at(params, row, expert), target)
        return target

    @device_fn
    def expert_rows(params, row, source, first, before, writes, lane):
        a, b = i32(first + lane), i32(first + 32 + lane)
        if not has_meta:
            return (known_row(params, row, a), i32(0)), (known_row(params, row, b), i32(0)), i32(0)
        masks, base = params[p_masks], params[p_base]
        slots, limit = params[p_slots], i32(params[p_rows])
        window = i32(u32(first) // u32(32))
        here_a, here_b = mask_of(masks, row, window), mask_of(masks, row, i32(window + 1))
        is_a = u32(here_a >> u32(lane)) & u32(1) != u32(0)
        is_b = u32(here_b >> u32(lane)) & u32(1) != u32(0)
        before_b = i32(before + popc(here_a))
        place_a, place_b = place_in(here_a, before, lane), place_in(here_b, before_b, lane)
        of_a = look_up(slots, base, row, source, a, place_a, is_a)
        of_b = look_up(slots, base, row, source, b, place_b, is_b)
        row_a = noted(params, row, a, of_a, limit, is_a, writes)
        row_b = noted(params, row, b, of_b, limit, is_b, writes)
        return (row_a, place_a), (row_b, place_b), i32(before_b + popc(here_b))

    return expert_rows


def clear_row_of(shape, block):
    """Device function clear_row(params, row, lane): zeros in an output row, its prob and its scales, by a warp."""
    has_probs, out_bytes = shape.has_probs, vectors_of(shape) * VECTOR
    n_vectors, n_scales = out_bytes // VECTOR, shape.scale_words if shape.encode else 0
    p_out, p_out_probs, p_out_scales = (block.index(name) for name in ("out", "out_probs", "out_scales"))

    @device_fn
    def clear_row(params, row, lane):
        out, i = params[p_out] + u64(row) * u64(out_bytes), i32(lane)
        while i < n_vectors:
            store16(out + u64(VECTOR) * u64(i), u32(0), u32(0), u32(0), u32(0))
            i = i32(i + 32)
        if has_probs and lane == 0:
            store_u32(params[p_out_probs] + u64(4) * u64(row), u32(0))
        if n_scales > 0:
            scales, i = params[p_out_scales] + u64(4) * u64(row) * u64(n_scales), i32(lane)
            while i < n_scales:
                store_u32(scales + u64(4) * u64(i), u32(0))
                i = i32(i + 32)

    return clear_row


def _clear_rows(shape, block):
    """Device function clear_rows(params, me, warps, lane): zeros in rows of padding, and behind the last expert's rows.

    For warp `me` of so many that share this.
    """
    local, clear_row = shape.n_local_experts, clear_row_of(shape, block)
    p_starts, p_rows = block.index("expert_rows"), block.index("n_rows")

    @device_fn
    def holds_token(starts, row, lane):
        """Whether some expert has a token in this row; a lane looks at an expert."""
        expert, found = i32(lane), False
        while expert < local:
            start = i32(load_i32(starts + u64(4) * u64(expert)))
            if row >= start and row - start < load_i32(starts + u64(4) * u64(local + expert)):
                found = True
            expert = i32(expert + 32)
        return ballot(found) != 0

    @device_fn
    def clear_rows(params, me, warps, lane):
        n_rows, starts = i32(params[p_rows]), params[p_starts]
        row = i32(me)
        while row < n_rows:
            if not holds_token(starts, row, lane):
                clear_row(params, row, lane)
            row = i32(row + warps)

    return clear_rows


def make(shape, block):
    """Device functions (expand_row, clear_rows) for one kernel, whose params `sources` are what came with the rows.

    expand_row(params, row, source, first, end, is_first, lane): a warp; 16-byte vectors [first, end) of a received row
    to the rows of its experts, with their scales, and, is_first, what else goes with them. clear_rows: see _clear_rows.
    has_meta: the handle's expert_row is written too, else it is read. encode: rows are blockwise FP8 messages, whose
    scales go to out_scales [P, scale_words].
    """
    local, row_bytes, has_probs = shape.n_local_experts, shape.row_bytes, shape.has_probs
    out_bytes, n_scales = vectors_of(shape) * VECTOR, shape.scale_words if shape.encode else 0
    expert_rows, clear_rows = _expert_rows(shape, block), _clear_rows(shape, block)
    load_batch, store_batch, _ = copy_to_lanes(read_only=False)
    p_sources, p_out = block.index("sources"), block.index("out")
    p_probs = p_sources + 2
    p_out_probs, p_out_scales = block.index("out_probs"), block.index("out_scales")

    @device_fn
    def copy_scales(params, src, target, mask, start, end, lane):
        """The scales of the vectors [start, end)."""
        left, scales = u32(mask), params[p_out_scales]
        while left != u32(0):
            to = scales + u64(4) * u64(warp_broadcast_i32(target, i32(ffs(left) - 1))) * u64(n_scales)
            i = i32(start // A_SCALE + lane)
            while i < n_scales and A_SCALE * i < end:
                store_u32(to + u64(4) * u64(i), load_u32(src + u64(out_bytes) + u64(4) * u64(i)))
                i = i32(i + 32)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def copy_prob(params, row, target, place):
        if target >= 0:
            probs = params[p_probs]
            value = load_u32(probs + u64(4) * (u64(row) * u64(local) + u64(place)))
            store_u32(params[p_out_probs] + u64(4) * u64(target), value)

    @device_fn
    def expand_row(params, row, source, start, end, is_first, lane):
        src = params[p_sources] + u64(row) * u64(row_bytes)
        out = params[p_out]
        first, before = i32(0), i32(0)
        while first < local:                    # two windows of experts
            batch = load_batch(src, start, end, lane)       # on its way while their rows are looked up
            (a, place_a), (b, place_b), before = expert_rows(params, row, source, first, before, is_first, lane)
            mask_a, mask_b, base = u32(ballot(a >= 0)), u32(ballot(b >= 0)), i32(start)
            while base < end:
                if base > start:
                    batch = load_batch(src, base, end, lane)
                store_batch(batch, out + u64(a) * u64(out_bytes), mask_a, i32(0), base, end, lane)
                store_batch(batch, out + u64(b) * u64(out_bytes), mask_b, i32(0), base, end, lane)
                base = i32(base + BATCH)
            if is_first and has_probs:
                copy_prob(params, row, a, place_a)
                copy_prob(params, row, b, place_b)
            if n_scales > 0:
                copy_scales(params, src, a, mask_a, start, end, lane)
                copy_scales(params, src, b, mask_b, start, end, lane)
            first = i32(first + 64)

    return expand_row, clear_rows


@lru_cache(CACHED)
def expand_kernel(shape):
    """Kernel over received rows that have all come; one launch behind the dispatch, where that one does not expand."""
    block, ranks = parameter_block(shape.n_ranks), shape.n_ranks
    expand_row, clear_rows = make(shape, block)
    count_parts, part_span = parts(vectors_of(shape))
    p_counts = block.index("counts")

    @device_fn
    def received(params, my_rank, lane):
        """Rows from the ranks up to `lane`."""
        here = i32(0)
        if lane < ranks:
            here = i32(load_i32(params[p_counts] + u64(4) * u64(lane * ranks + my_rank)))
        return i32(warp_inclusive_sum_i32(here))

    @kernel(max_threads=shape.threads, words=block.n_words)
    def rows_expand(params, num_tokens, my_rank):
        lane = i32(lane_id())
        ends = received(params, my_rank, lane)
        n_rows = i32(warp_broadcast_i32(ends, i32(ranks - 1)))
        me, warps = i32(warp_id() * grid_dim() + block_idx()), i32(n_warps() * grid_dim())
        n_parts, unit = count_parts(n_rows, warps), i32(me)
        while unit < n_rows * n_parts:
            row, part = i32(unit // n_parts), i32(unit % n_parts)
            source = i32(ffs(u32(ballot(lane < ranks and ends > row))) - 1)
            a, b = part_span(part, n_parts)
            expand_row(params, row, source, a, b, part == 0, lane)
            unit = i32(unit + warps)
        clear_rows(params, me, warps, lane)

    return rows_expand
