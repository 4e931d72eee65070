"""Combine's way back: rows of expert outputs to the places (token, k) of the ranks that their tokens came from."""

from epmoe import layout
from epmoe.device import (ballot, block_dim, block_idx, device_fn, ffs, grid_dim, i32, lane_id, load_i32, load_u64,
                          n_warps, red_add_release_gpu_i32, shared_array, syncthreads, syncthreads_or, syncwarp,
                          thread_idx, u32, u64, warp_id)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import counters, transport
from .formats.row_copy import copy_input_vectors
from .spin import wait_for_own_blocks
from .status import COMBINE_ASYNC, FOR_FINISHED

WINDOW = 4096       # entries of region A that a block looks at at a time, in shared memory


def make_return_rows(cfg, block, fused):
    """Device function return_rows(params, my_rank), for the communicating blocks: one warp takes a row.

    fused: the cleaning up follows in the same launch, so each block counts itself in D when it has read region A.
    """
    at, peers = counters.words(cfg), transport.make(cfg, block)
    recv_buf, crosses, is_far, put, complete = peers.recv_buf, peers.crosses, peers.is_far, peers.put, peers.complete
    bytes_a_row = layout.combine_msg_bytes(cfg)
    copy = copy_input_vectors(bytes_a_row)
    ranks, top_k, tokens_per_rank, keeps_own = cfg.n_src_ranks, cfg.top_k, cfg.max_tokens_per_rank, cfg.skip_a2a
    n_entries = cfg.n_local_experts * ranks
    window = min(WINDOW, n_entries)
    p_rows, p_src_info, p_counters = block.offset("input_tokens"), block.offset("src_info"), block.offset("ep_counters")
    p_send = block.offset("send_buf_p")

    @device_fn
    def return_row(params, row, entry, at_row, my_rank, words, lane):
        src_info = u64(load_u64(params + u64(p_src_info))) + u64(8) * u64(row)
        token, k = i32(load_i32(src_info)), i32(load_i32(src_info + u64(4)))
        # what src_info says is another rank's memory: a wrong pair must not become a wild write there
        if token >= 0 and token < tokens_per_rank and k >= 0 and k < top_k:
            rank = i32(entry % ranks)
            if keeps_own:
                rank = i32(my_rank)
            place = recv_buf(params, rank, my_rank) + u64(token * top_k + k) * u64(bytes_a_row)
            to = place
            if crosses and is_far(rank, my_rank):       # out of send_buf, where the entry has a row for each token
                to = u64(load_u64(params + u64(p_send))) + u64(entry * tokens_per_rank + at_row) * u64(bytes_a_row)
            copy(to, u64(load_u64(params + u64(p_rows))) + u64(row) * u64(bytes_a_row), lane)
            if crosses and is_far(rank, my_rank):
                syncwarp()              # the row by all lanes, before the network reads it
                put(place, to, bytes_a_row, rank)
                complete()
        syncwarp()                      # the row by all lanes, before lane 0 releases it
        if lane == 0:
            red_add_release_gpu_i32(words + u64(at.finished) + u64(4) * u64(entry), i32(1))  # acquired by the signaller

    @device_fn
    def return_rows(params, my_rank):
        ends, counts = shared_array(window, int32), shared_array(window, int32)
        words, lane = u64(load_u64(params + u64(p_counters))), i32(lane_id())
        n_blocks, first = i32(grid_dim() - 1), i32(0)
        while first < n_entries:
            here, i = i32(min(window, n_entries - first)), i32(thread_idx())
            while i < here:
                entry = words + u64(at.a) + u64(8) * u64(first + i)
                ends[i], counts[i] = i32(load_i32(entry) - READY), i32(load_i32(entry + u64(4)))
                i = i32(i + block_dim())
            syncthreads()               # the window is there
            if fused:
                if first + here == n_entries and thread_idx() == 0:
                    red_add_release_gpu_i32(words + u64(at.d), i32(1))      # this block needs A no more
            base, last = i32(0), i32(ends[here - 1])
            row = i32(ends[0] - counts[0] + warp_id() * n_blocks + block_idx() - 1)
            while row < last:
                # the first entry that ends behind the row; entries end in ascending order
                found = u32(0)
                while found == u32(0):
                    end = i32(row)
                    if base + lane < here:
                        end = i32(ends[base + lane])
                    found = u32(ballot(end > row))
                    if found == u32(0):
                        base = i32(base + 32)
                i = i32(base + ffs(found) - 1)
                if row >= ends[i] - counts[i]:      # else it is a padding row between two experts
                    at_row = i32(0)                 # of the entry's rows
                    if crosses:
                        at_row = i32(row - ends[i] + counts[i])
                    return_row(params, row, i32(first + i), at_row, my_rank, words, lane)
                row = i32(row + n_warps() * n_blocks)
            first = i32(first + window)
            if first < n_entries:
                syncthreads()           # nobody reads the old window any more
        return

    return return_rows


def make_signal_counts(cfg, block):
    """Device function signal_counts(params, my_rank) -> whether it had to give up; for the signalling block.

    Every pair (local expert, source rank) is signalled in every round, also where no row goes back.
    """
    at, signal = counters.words(cfg), transport.make(cfg, block).signal
    ranks, keeps_own = cfg.n_src_ranks, cfg.skip_a2a
    n_entries = cfg.n_local_experts * ranks
    p_counters, p_status, p_timeout = block.offset("ep_counters"), block.offset("status"), block.offset("timeout_ns")

    @device_fn
    def signal_counts(params, my_rank):
        words, status = u64(load_u64(params + u64(p_counters))), u64(load_u64(params + u64(p_status)))
        timeout_ns = u64(load_u64(params + u64(p_timeout)))
        ok, entry = True, i32(thread_idx())
        while ok and entry < n_entries:
            count = i32(load_i32(words + u64(at.a) + u64(8) * u64(entry) + u64(4)))
            rank, source = i32(entry % ranks), i32(my_rank)
            if keeps_own:
                rank, source = i32(my_rank), i32(0)
            # acquires the rows that all warps released; `signal` passes them on at system scope
            ok = wait_for_own_blocks(words + u64(at.finished) + u64(4) * u64(entry), count, status, timeout_ns,
                                     COMBINE_ASYNC, FOR_FINISHED, entry)
            if ok:
                signal(params, rank, my_rank, i32(entry // ranks * ranks + source), count)
            entry = i32(entry + block_dim())
        return syncthreads_or(not ok)

    return signal_counts
