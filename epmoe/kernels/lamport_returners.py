"""The sending part of a combine without signals (lamport.py): divides region A into runs of rows, and tells peers
BEGUN.
"""

from epmoe.device import (atomic_add_acq_rel_gpu_i32, block_dim, block_idx, device_fn, grid_dim, i32, lane_id, load_i32,
                          n_warps, shared_array, store_i32, syncthreads_or, syncwarp, thread_idx, u64,
                          warp_broadcast_i32, warp_id)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import counters, row_pieces, row_runs, stamps, transport
from .lamport import BEGUN


def make(cfg, block, mark):
    """Device function return_rows(params, words, rows, src_infos, my_rank, failed), as in returners.py.

    Region A is put back by the last block that has read it: nobody needs it any more.
    """
    at, n_entries, n_ranks = counters.words(cfg), cfg.n_local_experts * cfg.n_src_ranks, cfg.n_ranks
    send_runs = row_runs.make(cfg, row_pieces.make(cfg, block, without_signals=True))
    signal = transport.make(cfg, block).signal

    @device_fn
    def clear_when_all_have_read(words):
        """By the last warp of a block, behind a barrier: its first warps have the first rows to send."""
        i, last = i32(lane_id()), i32(0)
        if i == 0:
            # release: this block has read A; acquire: all others have
            last = i32(atomic_add_acq_rel_gpu_i32(words + u64(at.d), i32(1)) == grid_dim() - 1)
        last = i32(warp_broadcast_i32(last, 0))
        syncwarp()                              # lane 0 acquired for all
        if last != 0:
            if i == 0:
                store_i32(words + u64(at.d), i32(0))
            while i < 2 * n_entries:
                store_i32(words + u64(at.a) + u64(4) * u64(i), i32(0))
                i = i32(i + 32)

    @device_fn
    def return_rows(params, words, rows, src_infos, my_rank, failed):
        ends, counts, i = shared_array(n_entries, int32), shared_array(n_entries, int32), i32(thread_idx())
        while i < n_entries:
            word = words + u64(at.a) + u64(8) * u64(i)
            ends[i], counts[i] = i32(load_i32(word) - READY), i32(load_i32(word + u64(4)))
            i = i32(i + block_dim())
        if syncthreads_or(failed):              # and A is there
            return True
        mark(params, stamps.COUNTED)
        if block_idx() == grid_dim() - 1 and thread_idx() < n_ranks:
            # release: what this rank has read in the dispatch before, which its peers' next one overwrites
            signal(params, i32(thread_idx()), my_rank, my_rank, i32(BEGUN))
        if warp_id() == n_warps() - 1:
            clear_when_all_have_read(words)
        send_runs(params, words, rows, src_infos, i32(0), i32(n_entries), my_rank, ends, counts, counts)
        mark(params, stamps.SENT)
        return False

    return return_rows
