"""Few rows, here as soon as they are known: every warp finds the places of its rows by itself, and waits for no other.

Where payloads are rows as they are, the rows of a rank follow one another as the words of its recv_count do: a row's
place is the number of messages that the words before its own tell of. A warp adds them up in a handful of steps, which
takes less time than the barriers behind which a block would share the work.
"""

from epmoe.device import ballot, device_fn, ffs, i32, lane_id, shfl_idx, u64, warp_inclusive_sum_i32

from . import formats, stamps
from .division import divided

LANES = 32


def applies(cfg, places):
    """Whether rows need no padding, none are put in front of them, and a block remembers all words."""
    n_segments = cfg.n_local_experts * cfg.n_src_ranks
    return formats.of(cfg).direct and not cfg.fused_shared_expert and n_segments <= places.known


def make(cfg, mark, places, copy_row):
    """(copy, write): device functions of a warp, behind a barrier after the block's threads have acquired all messages.

    copy(params, recv_buf, my_rank, worker, workers, counts, words): the rows' parts that are this worker's.
    write(params, counts): row_offsets, expert_ids, regions A and B, and counts.
    """
    local, ranks, decode_parts = cfg.n_local_experts, cfg.n_src_ranks, formats.of(cfg).decode_parts
    experts_a_lane = -(-local // LANES)
    run, n_segments = experts_a_lane * ranks, local * ranks
    write_segment, end_group = places.write_segment, places.end_group

    @device_fn
    def rows_of_lane(counts, lane):
        """How many rows the segments of this lane have, which follow one another, and up to their end."""
        n_rows, i = i32(0), i32(0)
        while i < run:
            if lane * run + i < n_segments:
                n_rows = i32(n_rows + counts[lane * run + i])
            i = i32(i + 1)
        return n_rows, i32(warp_inclusive_sum_i32(n_rows))

    @device_fn
    def copy(params, recv_buf, my_rank, worker, workers, counts, words):
        lane = i32(lane_id())
        here, end = rows_of_lane(counts, lane)
        n_rows, unit = i32(shfl_idx(end, i32(LANES - 1))), i32(worker)
        n_parts = i32(max(1, min(decode_parts, divided(workers, i32(max(1, n_rows))))))
        mark(params, stamps.PLACED)
        while unit < n_rows * n_parts:
            row = divided(unit, n_parts)
            holder = i32(i32(ffs(ballot(end > row))) - 1)
            slot, j = i32(row - i32(shfl_idx(i32(end - here), holder))), i32(holder * run)
            while slot >= counts[j]:
                slot, j = i32(slot - counts[j]), i32(j + 1)
            copy_row(params, recv_buf, u64(words[j]), j, slot, row, i32(j // ranks), slot, i32(0), my_rank,
                     i32(unit - row * n_parts), n_parts, lane)
            unit = i32(unit + workers)

    @device_fn
    def write(params, counts):
        lane = i32(lane_id())
        here, end = rows_of_lane(counts, lane)
        start, i = i32(end - here), i32(0)
        mark(params, stamps.PLACED)
        while i < experts_a_lane:
            expert, before, source = i32(lane * experts_a_lane + i), i32(0), i32(0)
            while expert < local and source < ranks:
                entry = i32(expert * ranks + source)
                write_segment(params, entry, start, before, i32(counts[entry]))
                before, source = i32(before + counts[entry]), i32(source + 1)
            if expert < local:
                end_group(params, expert, start, before)
            start, i = i32(start + before), i32(i + 1)

    return copy, write
