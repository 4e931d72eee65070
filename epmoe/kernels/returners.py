"""Combine's way back: rows of expert outputs to the places (token, k) of the ranks that their tokens came from.

Region A says for each entry, (local expert, source rank), where its rows end and how many they are. The blocks deal the
rows out among themselves, in whole entries (whole_entries.py), of which each block knows its own before region A
(block_shares.py), or in runs of rows (row_runs.py); what a warp sends at a time is a piece of a row (row_pieces.py).
"""

from epmoe.device import (block_dim, block_idx, device_fn, grid_dim, i32, load_i32, shared_array, syncthreads,
                          syncthreads_or, thread_idx, u64)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import block_shares, counters, row_pieces, row_runs, stamps, whole_entries

WINDOW = 2048       # entries of region A that a block looks at at a time, in shared memory


def make(cfg, block, mark):
    """Device function return_rows(params, words, rows, src_infos, my_rank, failed), for all blocks.

    Gives whether it had to give up. Every entry is signalled in every round, also where no row goes back. words: the
    address of ep_counters. failed: whether this thread knows of an earlier wait that expired. Has a barrier before it
    sends.
    """
    at, pieces = counters.words(cfg), row_pieces.make(cfg, block)
    shares = block_shares.make(cfg, pieces.cut)
    send_runs, (sends_whole, send_whole) = row_runs.make(cfg, pieces), whole_entries.make(cfg, pieces, shares)
    signal, most_rows, share_words, write_share = pieces.signal, whole_entries.MOST_ROWS, shares.n_words, shares.write
    n_entries = cfg.n_local_experts * cfg.n_src_ranks
    window = min(WINDOW, n_entries)

    @device_fn
    def load_entry(words, entry, most):
        """The two words of region A, if the entry is below `most`."""
        end, count = i32(0), i32(0)
        if entry < most:
            word = words + u64(at.a) + u64(8) * u64(entry)
            end, count = i32(load_i32(word)), i32(load_i32(word + u64(4)))
        return end, count

    @device_fn
    def return_rows(params, words, rows, src_infos, my_rank, failed):
        ends, counts, done = shared_array(window, int32), shared_array(window, int32), shared_array(window, int32)
        share, first = shared_array(share_words, int32), i32(0)
        while first < n_entries:
            here, i, is_small = i32(min(window, n_entries - first)), i32(thread_idx()), window == n_entries
            end, count = load_entry(words, i32(first + i), i32(first + here))
            if window == n_entries:             # else entries do not go whole
                write_share(share, my_rank)     # while the words are on their way
            while i < here:
                ends[i], counts[i], done[i] = i32(end - READY), count, 0
                is_small = is_small and count <= most_rows
                i = i32(i + block_dim())
                end, count = load_entry(words, i32(first + i), i32(first + here))
            if syncthreads_or(failed or not is_small):      # the window is there
                if syncthreads_or(failed):
                    return True
                is_small = False
            mark(params, stamps.COUNTED)
            if block_idx() == grid_dim() - 1:
                i = i32(thread_idx())
                while i < here:
                    if counts[i] == 0:
                        signal(params, i32(first + i), my_rank, i32(0))
                    i = i32(i + block_dim())
            if sends_whole(i32(ends[here - 1] - ends[0] + counts[0]), is_small):
                send_whole(params, rows, src_infos, my_rank, ends, counts, share)
            else:
                send_runs(params, words, rows, src_infos, first, here, my_rank, ends, counts, done)
            first = i32(first + window)
            if first < n_entries:
                syncthreads()               # nobody reads the old window any more
        mark(params, stamps.SENT)
        return False

    return return_rows
