"""The sending part of combine: rows of expert outputs to the places (token, k) of their tokens' ranks.

Region A gives for each segment (local expert, src_rank) its end row and its number of rows. Each block sends a run of
consecutive rows (row_runs.py); a warp sends one piece of a row at a time (row_pieces.py).
"""

from epmoe.device import (block_dim, block_idx, device_fn, grid_dim, i32, load_i32, shared_array, syncthreads,
                          syncthreads_or, thread_idx, u64)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import counters, row_pieces, row_runs, stamps

WINDOW = 2048       # entries of region A that a block looks at at a time, in shared memory


def make(cfg, block, mark):
    """Device function return_rows(params, words, rows, src_infos, my_rank, failed), for all blocks.

    Gives whether it had to give up. Every entry is signalled in every round, also where no row goes back. words: the
    address of ep_counters. failed: whether this thread knows of an earlier wait that expired. Has a barrier before it
    sends.
    """
    at, pieces = counters.words(cfg), row_pieces.make(cfg, block)
    send_runs, signal = row_runs.make(cfg, pieces), pieces.signal
    n_entries = cfg.n_local_experts * cfg.n_src_ranks
    window = min(WINDOW, n_entries)

    @device_fn
    def return_rows(params, words, rows, src_infos, my_rank, failed):
        ends, counts, done = shared_array(window, int32), shared_array(window, int32), shared_array(window, int32)
        first = i32(0)
        while first < n_entries:
            here, i = i32(min(window, n_entries - first)), i32(thread_idx())
            while i < here:
                word = words + u64(at.a) + u64(8) * u64(first + i)
                ends[i], counts[i], done[i] = i32(load_i32(word) - READY), i32(load_i32(word + u64(4))), 0
                i = i32(i + block_dim())
            if syncthreads_or(failed):          # the window is there
                return True
            mark(params, stamps.COUNTED)
            if block_idx() == grid_dim() - 1:
                i = i32(thread_idx())
                while i < here:
                    if counts[i] == 0:
                        signal(params, i32(first + i), my_rank, i32(0))
                    i = i32(i + block_dim())
            send_runs(params, words, rows, src_infos, first, here, my_rank, ends, counts, done)
            first = i32(first + window)
            if first < n_entries:
                syncthreads()               # all have read the old window
        mark(params, stamps.SENT)
        return False

    return return_rows
