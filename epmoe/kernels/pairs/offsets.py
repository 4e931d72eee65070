"""Turns the counts of all src_ranks into the rows of their messages; each receiving block computes this for itself.

Step 5 of dispatch.py. It takes less time than waiting for one block to do it for all.
"""

from typing import NamedTuple

from epmoe.device import ballot, block_dim, device_fn, i32, lane_id, store_i32, thread_idx, u64
from epmoe.layout import ANNOUNCED, DESCRIBED, MAX_FINITE
from epmoe_ref.config import READY

from .. import formats
from ..bits import block_sums, divided_up, lowest
from ..formats.nv_block_scaled import TILE_ROWS
from ..params import namespace
from ..plain import counters
from ..plain.receive import shared_expert_share
from ..wait import wait_below
from ..status import DISPATCH_WAIT, FOR_RECV_COUNT
from .message import count_of


class Window(NamedTuple):
    """A window of the local experts, `here` of them from `first` on; the arrays are in shared memory.

    counts, words [here, src_rank]: numbers of messages, and the words of recv_count that hold them (only n_words of
    them). before [here, src_rank]: rows of the expert from lower src_ranks. ends [here, src_rank]: rows of the window
    up to the end of this segment, without padding rows. starts, tiles [here]: the expert's first output row and tile.
    partial: int32 [32], for block_sums.
    """

    first: int
    here: int
    counts: object
    words: object
    before: object
    ends: object
    starts: object
    tiles: object
    partial: object


@device_fn
def segment_of_row(ends, n_segments, row):
    """The segment that has the row: the first one that ends after it. `ends` ascend. A warp compares 32 at a time."""
    low, n = i32(0), i32(n_segments)
    while n > 1:
        stride = divided_up(n, i32(32))
        last = i32(min(low + n - 1, low + (lane_id() + 1) * stride - 1))    # of the lane's part of them
        part = lowest(ballot(ends[last] > row))
        n, low = i32(min(stride, n - part * stride)), i32(low + part * stride)
    return low


def make(build):
    """Namespace "offsets" of device functions of a block, for windows of at most `experts` experts.

    n_experts, n_counts: the most experts of a window, and segments of these. n_words: of how many it keeps the word.
    has_tiles: whether the format keeps scales in 128-row tiles; otherwise begin_group and finish_group do nothing.
    await_counts(call, first, here, counts, words) -> (whether all came, is_final). is_final: every word that this
        thread loaded is 0 or a packed signal. No announcement precedes these, so all blocks see the same; and their
        messages are here.
    await_messages: like await_counts, but it waits for signals: all messages are here.
    begin(call) -> (output row, 128-row tile) at which the first window begins.
    place(window, start) -> the next window's `start`; fills before, ends, starts and tiles, without a last barrier.
    write(call, window): the whole block writes the window's results: row_offsets, expert_ids, regions A and B,
        recv_counts, (-1, -1) as src_info of padding rows, and what begin_group writes.
    write_first(call): writes the results before all windows; `write` does so with the first window.
    write_segment(call, segment, start, before, count), write_group(call, group, start, n_rows, tiles_before): one
        thread writes the results of a segment, or of a group that begins at row `start`.
    """
    cfg, tuning, threads = build.cfg, build.tuning, build.threads
    fmt, word, share = formats.of(cfg), counters.words(cfg), shared_expert_share(cfg)
    has_tiles, pad_rows, begin_group = "scales_offset" in fmt.output_fields, fmt.pad_rows, fmt.begin_group
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    # one thread an expert; a launch of few tokens may have only few_threads_a_token threads
    experts = max(1, min(local, threads, tuning.few_threads_a_token, tuning.counts // ranks))
    n_words = min(experts * ranks, tuning.known_words)

    # rows of a group with its padding, and its tiles of scales
    padded = device_fn(lambda n_rows: i32(divided_up(n_rows, i32(pad_rows)) * pad_rows))
    tiles_of = device_fn(lambda n_rows: divided_up(n_rows, i32(TILE_ROWS)))

    @device_fn
    def begin(call):
        _, n_shared = share(call.num_tokens, call.my_rank)
        return padded(n_shared), tiles_of(n_shared)

    def awaiting(below):
        @device_fn
        def await_words(call, first, here, counts, words):
            ok, is_final, i = True, True, i32(thread_idx())
            while ok and i < here * ranks:
                segment = i32(first * ranks + i)
                seen = wait_below(call.recv_count_p + u64(8) * u64(segment), u64(below), call, DISPATCH_WAIT,
                                  FOR_RECV_COUNT, segment)
                ok = seen != u64(MAX_FINITE)
                if ok:
                    counts[i] = count_of(seen)
                    if i < n_words:
                        words[i] = seen
                    is_final = is_final and (seen == u64(0) or (seen >= u64(DESCRIBED) and seen < u64(ANNOUNCED)))
                i = i32(i + block_dim())
            return ok, is_final

        return await_words

    @device_fn
    def place(window, start):
        expert, n_rows, r = i32(thread_idx()), i32(0), i32(0)
        while expert < window.here and r < ranks:
            n_rows = i32(n_rows + window.counts[expert * ranks + r])
            r = i32(r + 1)
        padded_before, padded_here = block_sums(padded(n_rows), window.partial)
        rows_before, tiles_before, tiles_here = padded_before, i32(0), i32(0)
        if pad_rows > 1:
            rows_before, _ = block_sums(n_rows, window.partial)
        if has_tiles:
            tiles_before, tiles_here = block_sums(tiles_of(n_rows), window.partial)
        if expert < window.here:
            window.starts[expert], window.tiles[expert] = i32(start[0] + padded_before), i32(start[1] + tiles_before)
        n_rows, r = i32(0), i32(0)
        while expert < window.here and r < ranks:
            window.before[expert * ranks + r] = n_rows
            n_rows = i32(n_rows + window.counts[expert * ranks + r])
            window.ends[expert * ranks + r] = i32(rows_before + n_rows)
            r = i32(r + 1)
        return i32(start[0] + padded_here), i32(start[1] + tiles_here)

    @device_fn
    def write_group(call, group, start, n_rows, tiles_before):
        """Writes a group's end in row_offsets, its id, its first tile, and (-1, -1) as src_info of its padding rows."""
        begin_group(call.format_handler, group, start, tiles_before)
        end, row = i32(start + padded(n_rows)), i32(start + n_rows)
        store_i32(call.row_offsets + u64(4) * u64(group + 1), end)
        store_i32(call.expert_ids + u64(4) * u64(group), group)
        while row < end:
            store_i32(call.src_info + u64(8) * u64(row), i32(-1))
            store_i32(call.src_info + u64(8) * u64(row) + u64(4), i32(-1))
            row = i32(row + 1)

    @device_fn
    def write_segment(call, segment, start, before, count):
        """Writes regions A and B, and the count for the caller."""
        store_i32(word.a_end(call.ep_counters, segment), i32(READY + start + before + count))
        store_i32(word.a_count(call.ep_counters, segment), count)
        store_i32(word.b(call.ep_counters, segment), i32(before + count))
        if call.recv_counts != u64(0):
            store_i32(call.recv_counts + u64(4) * u64(segment), count)

    @device_fn
    def write_first(call):
        _, n_shared = share(call.num_tokens, call.my_rank)
        if thread_idx() == 0:
            store_i32(call.row_offsets, i32(0))
            if front == 1:
                write_group(call, i32(0), i32(0), n_shared, i32(0))

    @device_fn
    def write(call, window):
        if window.first == 0:
            write_first(call)
        i = i32(thread_idx())
        while i < window.here * ranks:
            write_segment(call, i32(window.first * ranks + i), window.starts[i // ranks], window.before[i],
                          window.counts[i])
            i = i32(i + block_dim())
        i = i32(thread_idx())
        if i < window.here:
            last = i32(i * ranks + ranks - 1)
            write_group(call, i32(front + window.first + i), i32(window.starts[i]),
                        i32(window.before[last] + window.counts[last]), i32(window.tiles[i]))

    return namespace("offsets", n_experts=experts, n_counts=experts * ranks, n_words=n_words, has_tiles=has_tiles,
                     await_counts=awaiting(MAX_FINITE), await_messages=awaiting(ANNOUNCED), place=place,
                     begin=begin, write=write, write_first=write_first, write_segment=write_segment,
                     write_group=write_group)
