"""The end of a half: the last block of a kernel resets the counters to their values before the round.

Every block counts itself in D when it no longer needs the counters. Everything that the blocks did before is ordered
before the last block's resets, so the host need not reset anything between rounds.
"""

from epmoe.device import (atomic_add_acq_rel_gpu_i32, device_fn, grid_dim, i32, lane_id, store_i32, store_u64,
                          syncwarp, u64, warp_broadcast_i32)
from epmoe.layout import MAX_FINITE

from . import counters


def make(cfg, block, clear):
    """Device function leave(params, words): by one warp of every block, whose lane 0 all the block's work comes before.

    words: the address of ep_counters. clear: device function (words, entry), which puts the kernel's own counters of a
    (local expert, rank) back; D and recv_count are put back here.
    """
    at, p_count, n_entries = counters.words(cfg), block.index("recv_count_p"), cfg.n_local_experts * cfg.n_src_ranks

    @device_fn
    def leave(params, words):
        lane, recv_count, last = i32(lane_id()), params[p_count], i32(0)
        if lane == 0:
            # release: what this block did with the counters; acquire: what all the others did
            last = i32(atomic_add_acq_rel_gpu_i32(words + u64(at.d), i32(1)) == grid_dim() - 1)
        last = i32(warp_broadcast_i32(last, 0))
        syncwarp()                      # lane 0 acquired for all
        if last != 0:
            i = lane
            while i < n_entries:
                # A peer signals this word again only when this rank has answered it, in a later kernel.
                store_u64(recv_count + u64(8) * u64(i), u64(MAX_FINITE))
                clear(words, i)
                i = i32(i + 32)
            if lane == 0:
                store_i32(words + u64(at.d), i32(0))

    return leave
