"""Combine's way back: rows of expert outputs to the places (token, k) of the ranks that their tokens came from."""

from epmoe import layout
from epmoe.device import (atomic_add_acq_rel_gpu_i32, ballot, block_dim, block_idx, device_fn, ffs, grid_dim, i32,
                          lane_id, load_i32, load_u64, n_warps, shared_array, store_i32, syncthreads,
                          syncthreads_or, syncwarp, thread_idx, u32, u64, warp_id)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import counters, stamps, transport
from .formats.row_copy import copy_part, most_parts

WINDOW = 2048       # entries of region A that a block looks at at a time, in shared memory


def make(cfg, block, mark):
    """Device function return_rows(params, my_rank, failed) -> whether it had to give up; for all blocks.

    Every pair (local expert, source rank) is signalled in every round, also where no row goes back: by the warp that
    writes the last piece of its rows. failed: whether this thread knows of an earlier wait that expired.
    """
    at, to = counters.words(cfg), transport.make(cfg, block)
    recv_buf, crosses, is_far, put, complete, signal = (to.recv_buf, to.crosses, to.is_far, to.put, to.complete,
                                                        to.signal)
    bytes_a_row = layout.combine_msg_bytes(cfg)
    copy, most = copy_part(bytes_a_row, read_only=True), most_parts(bytes_a_row)
    ranks, top_k, tokens_per_rank, keeps_own = cfg.n_src_ranks, cfg.top_k, cfg.max_tokens_per_rank, cfg.skip_a2a
    n_entries = cfg.n_local_experts * ranks
    window = min(WINDOW, n_entries)
    p_rows, p_src_info, p_counters = block.offset("input_tokens"), block.offset("src_info"), block.offset("ep_counters")
    p_send = block.offset("send_buf_p")

    @device_fn
    def signal_entry(params, entry, my_rank, count):
        rank, source = i32(entry % ranks), i32(my_rank)
        if keeps_own:
            rank, source = i32(my_rank), i32(0)
        signal(params, rank, my_rank, i32(entry // ranks * ranks + source), count)

    @device_fn
    def finish(params, entry, n_pieces, my_rank, count):
        """One thread, when its warp has written one of the n_pieces of the entry's rows: the last one signals."""
        finished = u64(load_u64(params + u64(p_counters))) + u64(at.finished) + u64(4) * u64(entry)
        # release: the piece that this warp has written; acquire: all the others, if this is the last
        if atomic_add_acq_rel_gpu_i32(finished, i32(1)) == n_pieces - 1:
            store_i32(finished, i32(0))
            signal_entry(params, entry, my_rank, count)

    @device_fn
    def return_piece(params, row, entry, at_row, part, n_parts, my_rank, lane):
        src_info = u64(load_u64(params + u64(p_src_info))) + u64(8) * u64(row)
        token, k = i32(load_i32(src_info)), i32(load_i32(src_info + u64(4)))
        # what src_info says is another rank's memory: a wrong pair must not become a wild write there
        if token >= 0 and token < tokens_per_rank and k >= 0 and k < top_k:
            rank = i32(entry % ranks)
            if keeps_own:
                rank = i32(my_rank)
            place = recv_buf(params, rank, my_rank) + u64(token * top_k + k) * u64(bytes_a_row)
            src = u64(load_u64(params + u64(p_rows))) + u64(row) * u64(bytes_a_row)
            is_near = True
            if crosses:
                is_near = not is_far(rank, my_rank)
            if is_near:
                copy(place, src, part, n_parts, lane)
            elif part == 0:         # out of send_buf, where the entry has a row for each token
                staged = u64(load_u64(params + u64(p_send))) + u64(entry * tokens_per_rank + at_row) * u64(bytes_a_row)
                copy(staged, src, 0, 1, lane)
                syncwarp()          # the row by all lanes, before the network reads it
                put(place, staged, bytes_a_row, rank)
                complete()

    @device_fn
    def return_window(params, first, here, n_parts, my_rank, ends, counts):
        """The rows of the window's entries; a warp takes pieces of rows."""
        lane, base, last = i32(lane_id()), i32(0), i32(ends[here - 1])
        start = i32(ends[0] - counts[0])
        unit = i32(warp_id() * grid_dim() + block_idx())
        while unit < (last - start) * n_parts:
            row = i32(start + unit // n_parts)
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
            count = i32(counts[i])
            at_row = i32(row - ends[i] + count)
            if at_row >= 0:                 # else it is a padding row between two experts
                return_piece(params, row, i32(first + i), at_row, i32(unit % n_parts), n_parts, my_rank, lane)
                syncwarp()                  # the piece by all lanes, before lane 0 releases it
                if lane == 0:
                    finish(params, i32(first + i), i32(count * n_parts), my_rank, count)
            unit = i32(unit + n_warps() * grid_dim())

    @device_fn
    def return_rows(params, my_rank, failed):
        ends, counts = shared_array(window, int32), shared_array(window, int32)
        words = u64(load_u64(params + u64(p_counters)))
        n_rows = i32(load_i32(words + u64(at.a) + u64(8 * n_entries - 8)) - READY)      # padding rows among them
        n_parts = i32(max(1, min(most, i32(n_warps() * grid_dim() // max(1, n_rows)))))
        first = i32(0)
        while first < n_entries:
            here, i = i32(min(window, n_entries - first)), i32(thread_idx())
            while i < here:
                entry = words + u64(at.a) + u64(8) * u64(first + i)
                ends[i], counts[i] = i32(load_i32(entry) - READY), i32(load_i32(entry + u64(4)))
                i = i32(i + block_dim())
            if syncthreads_or(failed):      # the window is there
                return True
            if block_idx() == grid_dim() - 1:
                i = i32(thread_idx())
                while i < here:
                    if counts[i] == 0:
                        signal_entry(params, i32(first + i), my_rank, i32(0))
                    i = i32(i + block_dim())
            return_window(params, first, here, n_parts, my_rank, ends, counts)
            first = i32(first + window)
            if first < n_entries:
                syncthreads()               # nobody reads the old window any more
        mark(params, stamps.SENT)
        return False

    return return_rows
