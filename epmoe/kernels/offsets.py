"""Turns the counts of all src_ranks into the rows of their messages; each receiving block computes this for itself.

Each block waits for the counts, which arrive long before most messages, and computes the places in shared memory. This
takes less time than waiting for one block to do it for all. One of the blocks also stores the results.
"""

from typing import NamedTuple

from epmoe.device import (block_dim, device_fn, i32, lane_id, n_warps, shfl_idx, store_i32, syncthreads,
                          thread_idx, u64, warp_id, warp_inclusive_sum_i32)
from epmoe.layout import ANNOUNCED, DESCRIBED, MAX_FINITE
from epmoe_ref.config import READY

from . import counters, few_tokens, formats, shared_expert
from .described import count_of
from .params import fields_of
from .spin import wait_for_count, wait_for_signal
from .status import DISPATCH_WAIT

MAX_COUNTS = 2048       # counts that are looked at at a time, in shared memory
MOST_KNOWN = 256        # words of them that are remembered
TILE_ROWS = 128         # rows of a tile of scales


def block_sum():
    """Device function (value, partial) -> (sum over the lower threads of the block, sum over all); int32.

    partial: a shared int32 array of 32. A barrier for the block.
    """
    @device_fn
    def sums(value, partial):
        lane, warp = lane_id(), warp_id()
        inclusive = i32(warp_inclusive_sum_i32(value))
        syncthreads()                           # all have read `partial` of the earlier call
        if lane == 31:
            partial[warp] = inclusive
        syncthreads()
        of_warp = i32(0)
        if lane < n_warps():
            of_warp = i32(partial[lane])
        up_to = i32(warp_inclusive_sum_i32(of_warp))
        before, total = i32(shfl_idx(up_to, i32((warp + 31) & 31))), i32(shfl_idx(up_to, i32(31)))
        if warp == 0:
            before = i32(0)
        return i32(before + inclusive - value), total

    return sums


class Places(NamedTuple):
    """Device functions of a block, and the sizes of what they fill, for a window of the local experts.

    experts, counts: the most experts of a window, and counts of them (one for each src_rank). known: see below.
    await_counts(params, first, here, counts, words) -> whether all came, those of `here` experts from `first` on, and
        whether all were of messages that had come, and never were anything else, so that all blocks see the same, as
        far as this thread looked. words: those of the first `known` counts.
    await_messages: the same, but it waits until all messages have come.
    place(here, start, counts, before, ends, starts, tiles, partial) -> the next window's `start`, before a barrier.
        start: (output row, 128-row tile) at which the window begins.
        before[expert, source]: rows of the expert from lower src_ranks. ends[expert, source]: rows of the window up
        to the end of this segment, padding rows not counted. starts, tiles[expert]: its first output row and tile.
    begin(params, num_tokens, my_rank) -> the first window's `start`.
    write(params, first, here, counts, before, starts, tiles): the results of a window, by the whole block: row_offsets,
        expert_ids, regions A and B, counts, (-1, -1) as src_info of padding rows, and what begin_group writes.
    write_first(params, num_tokens, my_rank): those in front of all windows.
    write_segment(params, entry, start, before, count), end_group(params, group, start, n_rows): what one thread writes
        of them, for a count, and for a group that begins at row `start`.
    """

    experts: int
    counts: int
    known: int
    await_counts: callable
    await_messages: callable
    place: callable
    begin: callable
    write: callable
    write_first: callable
    write_segment: callable
    end_group: callable


def make(cfg, block, threads) -> Places:
    """The functions for one parameter block and number of threads, or that of few tokens, if it is less."""
    fmt, at = formats.of(cfg), counters.words(cfg)
    has_tiles, pad_rows, begin_group = shared_expert.formats_with_tiles(fmt), fmt.pad_rows, fmt.begin_group
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    window = max(1, min(local, threads, few_tokens.THREADS_A_TOKEN, MAX_COUNTS // ranks))       # one thread an expert
    known = min(window * ranks, MOST_KNOWN)
    block_sums, share = block_sum(), shared_expert.share_of(cfg)
    p_counters, p_status, p_timeout = block.index("ep_counters"), block.index("status"), block.index("timeout_ns")
    p_count, fields, p_src_info = block.index("recv_count_p"), fields_of(block, "format_handler"), block.index("src_info")
    p_offsets, p_ids, p_counts = block.index("row_offsets"), block.index("expert_ids"), block.index("recv_counts")

    @device_fn
    def padded(n_rows):
        """Rows of a group of this size, with its padding."""
        return i32((n_rows + pad_rows - 1) // pad_rows * pad_rows)

    @device_fn
    def tiles_of(n_rows):
        """Tiles of scales of a group with this many rows."""
        return i32((n_rows + TILE_ROWS - 1) // TILE_ROWS)

    @device_fn
    def begin(params, num_tokens, my_rank):
        n_shared, _ = share(num_tokens, my_rank)
        return padded(n_shared), tiles_of(n_shared)

    def awaiting(wait):
        @device_fn
        def await_words(params, first, here, counts, words):
            status, timeout_ns = params[p_status], params[p_timeout]
            recv_count = params[p_count]
            ok, is_final, i = True, True, i32(thread_idx())
            while ok and i < here * ranks:
                entry = i32(first * ranks + i)
                word = wait(recv_count + u64(8) * u64(entry), status, timeout_ns, DISPATCH_WAIT, entry)
                ok = word != u64(MAX_FINITE)
                if ok:
                    counts[i] = count_of(word)
                    if i < known:
                        words[i] = word
                    is_final = is_final and (word == u64(0) or (word >= u64(DESCRIBED) and word < u64(ANNOUNCED)))
                i = i32(i + block_dim())
            return ok, is_final

        return await_words

    @device_fn
    def place(here, start, counts, before, ends, starts, tiles, partial):
        tid, n_rows, r = i32(thread_idx()), i32(0), i32(0)
        while tid < here and r < ranks:
            n_rows = i32(n_rows + counts[tid * ranks + r])
            r = i32(r + 1)
        padded_before, padded_here = block_sums(padded(n_rows), partial)
        rows_before, tiles_before, tiles_here = padded_before, i32(0), i32(0)
        if pad_rows > 1:
            rows_before, _ = block_sums(n_rows, partial)
        if has_tiles:
            tiles_before, tiles_here = block_sums(tiles_of(n_rows), partial)
        if tid < here:
            starts[tid], tiles[tid] = i32(start[0] + padded_before), i32(start[1] + tiles_before)
        n_rows, r = i32(0), i32(0)
        while tid < here and r < ranks:
            before[tid * ranks + r] = n_rows
            n_rows = i32(n_rows + counts[tid * ranks + r])
            ends[tid * ranks + r] = i32(rows_before + n_rows)
            r = i32(r + 1)
        return i32(start[0] + padded_here), i32(start[1] + tiles_here)

    @device_fn
    def end_group(params, group, start, n_rows):
        """The group's end in row_offsets, its id, and (-1, -1) as the source of its padding rows."""
        end = i32(start + padded(n_rows))
        store_i32(params[p_offsets] + u64(4) * u64(group + 1), end)
        store_i32(params[p_ids] + u64(4) * u64(group), group)
        src_info = params[p_src_info]
        row = i32(start + n_rows)
        while row < end:
            store_i32(src_info + u64(8) * u64(row), i32(-1))
            store_i32(src_info + u64(8) * u64(row) + u64(4), i32(-1))
            row = i32(row + 1)

    @device_fn
    def write_segment(params, entry, start, before, count):
        """Regions A and B, and the count for the caller."""
        words, given = params[p_counters], params[p_counts]
        store_i32(words + u64(at.a) + u64(8) * u64(entry), i32(READY + start + before + count))
        store_i32(words + u64(at.a) + u64(8) * u64(entry) + u64(4), count)
        store_i32(words + u64(at.b) + u64(4) * u64(entry), i32(before + count))
        if given != u64(0):
            store_i32(given + u64(4) * u64(entry), count)

    @device_fn
    def write(params, first, here, counts, before, starts, tiles):
        i = i32(thread_idx())
        while i < here * ranks:
            write_segment(params, i32(first * ranks + i), starts[i // ranks], before[i], counts[i])
            i = i32(i + block_dim())
        i = i32(thread_idx())
        if i < here:
            last = i32(i * ranks + ranks - 1)
            end_group(params, i32(front + first + i), starts[i], i32(before[last] + counts[last]))
        if has_tiles:
            i = i32(warp_id())
            while i < here:
                begin_group(fields(params), i32(front + first + i), i32(starts[i]), i32(tiles[i]), lane_id())
                i = i32(i + n_warps())

    @device_fn
    def write_first(params, num_tokens, my_rank):
        n_shared, _ = share(num_tokens, my_rank)
        if thread_idx() == 0:
            store_i32(params[p_offsets], i32(0))
            if front == 1:
                end_group(params, i32(0), i32(0), n_shared)
        if has_tiles and front == 1:
            if warp_id() == 0:
                begin_group(fields(params), i32(0), i32(0), i32(0), lane_id())

    return Places(window, window * ranks, known, awaiting(wait_for_count), awaiting(wait_for_signal), place, begin,
                  write, write_first, write_segment, end_group)
