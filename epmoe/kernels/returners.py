"""Combine's way back: rows of expert outputs to the places (token, k) of the ranks that their tokens came from.

The rows of the next rank come first, then those of the one behind it, this rank's own at last, and each block takes as
many that follow one another: so most entries of region A, (local expert, source rank), are one block's work, all peers
are sent to all the time, and blocks that have links to wait for have equally much to send. The warps of a block count
their pieces in shared memory, nobody waits until a piece has arrived before the next one goes, and the last warp
signals for all. Only entries that reach over several blocks are counted in device memory.
"""

from epmoe import layout
from epmoe.device import (atomic_add_acq_rel_gpu_i32, ballot, block_dim, block_idx, device_fn, fence_acq_rel_cta, ffs,
                          grid_dim, i32, lane_id, load16_nc, load_i32, load_u64, n_warps, shared_add_i32, shared_array,
                          shfl_idx, store16, store_i32, syncthreads, syncthreads_or, syncwarp, thread_idx, u64, warp_id,
                          warp_inclusive_sum_i32)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import counters, stamps, transport
from .formats.row_copy import LANES, copy_part, most_parts

WINDOW = 1024       # entries of region A that a block looks at at a time, in shared memory: 32 groups of 32
VECTOR = 16         # bytes


def make(cfg, block, mark, has_read):
    """Device function return_rows(params, words, my_rank, failed) -> whether it had to give up; for all blocks.

    Every pair (local expert, source rank) is signalled in every round, also where no row goes back. words: the address
    of ep_counters. failed: whether this thread knows of an earlier wait that expired. Has a barrier before it sends.
    has_read: a device function words, called by the block's last thread when the block needs region A no more.
    """
    at, to = counters.words(cfg), transport.make(cfg, block)
    recv_buf, crosses, is_far, put, complete = to.recv_buf, to.crosses, to.is_far, to.put, to.complete
    recv_count, signal_at = to.recv_count, to.signal_at
    bytes_a_row = layout.combine_msg_bytes(cfg)
    place_of, most = _placing(cfg), most_parts(bytes_a_row)
    stage, carry = copy_part(bytes_a_row, read_only=True), _carry_part(cfg, place_of)
    local, ranks = cfg.n_local_experts, cfg.n_src_ranks
    tokens_per_rank, keeps_own = cfg.max_tokens_per_rank, cfg.skip_a2a
    n_entries = local * ranks
    window = min(WINDOW, n_entries)
    n_groups = (window + LANES - 1) // LANES
    n_places = n_groups * LANES
    p_rows, p_src_info, p_send = block.offset("input_tokens"), block.offset("src_info"), block.offset("send_buf_p")

    @device_fn
    def entry_at(i, my_rank):
        """The i-th entry in the order of sending."""
        return i32(i % local * ranks + (my_rank + 1 + i // local) % ranks)

    @device_fn
    def rank_of(entry, my_rank):
        rank = i32(entry % ranks)
        if keeps_own:
            rank = i32(my_rank)
        return rank

    @device_fn
    def signal_entry(recv_count_there, entry, my_rank, count):
        source = i32(my_rank)
        if keeps_own:
            source = i32(0)
        signal_at(recv_count_there, rank_of(entry, my_rank), my_rank, i32(entry // ranks * ranks + source), count)

    @device_fn
    def finish(words, recv_count_there, entry, n_here, n_parts, my_rank, count, done, i):
        """One thread, when its warp has sent a piece of the entry's n_here rows in this block: the last one signals."""
        fence_acq_rel_cta()                             # release: the piece that this warp has written
        if shared_add_i32(done, i, i32(1)) == n_here * n_parts - 1:
            fence_acq_rel_cta()                         # acquire: all the others of this block
            is_last = n_here == count
            if not is_last:
                finished = words + u64(at.finished) + u64(4) * u64(entry)
                # release: this block's rows; acquire: those of all the others, if this is the last block
                if atomic_add_acq_rel_gpu_i32(finished, n_here) == count - n_here:
                    store_i32(finished, i32(0))
                    is_last = True
            if is_last:
                signal_entry(recv_count_there, entry, my_rank, count)

    @device_fn
    def send_piece(params, rows, src_infos, row, entry, at_row, part, n_parts, my_rank, lane):
        rank, src = rank_of(entry, my_rank), rows + u64(row) * u64(bytes_a_row)
        is_near = True
        if crosses:
            is_near = not is_far(rank, my_rank)
        if is_near:
            carry(recv_buf(params, rank, my_rank), src_infos + u64(8) * u64(row), src, part, n_parts, lane)
        elif part == 0:         # out of send_buf, where the entry has a row for each token
            src_info = src_infos + u64(8) * u64(row)
            place = place_of(recv_buf(params, rank, my_rank), i32(load_i32(src_info)),
                             i32(load_i32(src_info + u64(4))))
            if place != u64(0):
                staged = u64(load_u64(params + u64(p_send))) + u64(entry * tokens_per_rank + at_row) * u64(bytes_a_row)
                stage(staged, src, 0, 1, lane)
                syncwarp()          # the row by all lanes, before the network reads it
                put(place, staged, bytes_a_row, rank)
                complete()

    @device_fn
    def look_at_window(words, first, here, my_rank, ends, counts, sums, totals, done):
        """Entries first.. in the order of sending: where their rows end, and sums of their counts in groups of 32."""
        i, lane = i32(thread_idx()), i32(lane_id())
        while i < n_places:
            count = i32(0)
            if i < here:
                entry = words + u64(at.a) + u64(8) * u64(entry_at(i32(first + i), my_rank))
                end, count = i32(load_i32(entry)), i32(load_i32(entry + u64(4)))
                ends[i], counts[i], done[i] = i32(end - READY), count, 0
            total = i32(warp_inclusive_sum_i32(count))
            sums[i] = total
            if lane == LANES - 1:
                totals[i // LANES] = total
            i = i32(i + block_dim())

    @device_fn
    def return_window(params, words, rows, src_infos, first, my_rank, ends, counts, sums, totals, done):
        """This block's share of the rows of the window's entries; a warp takes pieces of rows."""
        lane, total = i32(lane_id()), i32(0)
        if lane < n_groups:
            total = i32(totals[lane])
        until = i32(warp_inclusive_sum_i32(total))                  # rows up to the end of group `lane`
        n = i32(shfl_idx(until, LANES - 1))
        each, more = i32(n // grid_dim()), i32(n % grid_dim())
        low = i32(block_idx() * each + min(block_idx(), more))
        n_rows = i32(each + i32(block_idx() < more))
        n_parts = i32(max(1, min(most, i32(n_warps() // max(1, n_rows)))))
        unit = i32(warp_id())
        while unit < n_rows * n_parts:
            q = i32(low + unit // n_parts)                          # which of the window's rows
            group = i32(ffs(ballot(until > q)) - 1)
            before = i32(shfl_idx(i32(until - total), group))
            i = i32(group * LANES + ffs(ballot(before + sums[group * LANES + lane] > q)) - 1)
            count, q_end = i32(counts[i]), i32(before + sums[i])
            row, entry = i32(ends[i] - q_end + q), entry_at(i32(first + i), my_rank)
            there = recv_count(params, rank_of(entry, my_rank), my_rank)
            send_piece(params, rows, src_infos, row, entry, i32(count - q_end + q), i32(unit % n_parts), n_parts,
                       my_rank, lane)
            syncwarp()                          # the piece by all lanes, before lane 0 releases it
            if lane == 0:
                n_here = i32(min(q_end, i32(low + n_rows)) - max(i32(q_end - count), low))
                finish(words, there, entry, n_here, n_parts, my_rank, count, done, i)
            unit = i32(unit + n_warps())

    @device_fn
    def return_rows(params, words, my_rank, failed):
        ends, counts, done = shared_array(window, int32), shared_array(window, int32), shared_array(window, int32)
        sums, totals = shared_array(n_places, int32), shared_array(n_groups, int32)
        rows, src_infos = u64(load_u64(params + u64(p_rows))), u64(load_u64(params + u64(p_src_info)))
        first = i32(0)
        while first < n_entries:
            here = i32(min(window, n_entries - first))
            look_at_window(words, first, here, my_rank, ends, counts, sums, totals, done)
            if syncthreads_or(failed):      # the window is there
                return True
            mark(params, stamps.COUNTED)
            if first + window >= n_entries and thread_idx() == block_dim() - 1:
                has_read(words)
            if block_idx() == grid_dim() - 1:
                i = i32(thread_idx())
                while i < here:
                    if counts[i] == 0:
                        entry = entry_at(i32(first + i), my_rank)
                        signal_entry(recv_count(params, rank_of(entry, my_rank), my_rank), entry, my_rank, i32(0))
                    i = i32(i + block_dim())
            return_window(params, words, rows, src_infos, first, my_rank, ends, counts, sums, totals, done)
            first = i32(first + window)
            if first < n_entries:
                syncthreads()               # nobody reads the old window any more
        mark(params, stamps.SENT)
        return False

    return return_rows


def _placing(cfg):
    """Device function (recv_buf, token, k) -> the address of place [token, k]; 0 if there is no such place.

    What src_info says is another rank's memory: a wrong pair must not become a wild write there.
    """
    bytes_a_row, top_k, tokens_per_rank = layout.combine_msg_bytes(cfg), cfg.top_k, cfg.max_tokens_per_rank

    @device_fn
    def place_of(recv_buf, token, k):
        place = u64(0)
        if token >= 0 and token < tokens_per_rank and k >= 0 and k < top_k:
            place = recv_buf + u64(token * top_k + k) * u64(bytes_a_row)
        return place

    return place_of


def _carry_part(cfg, place_of):
    """Device function (recv_buf, src_info, src, part, n_parts, lane): a warp copies its part of a row to its place.

    The first loads of the row are under way before src_info has said where the place is.
    """
    n_vectors = layout.combine_msg_bytes(cfg) // VECTOR
    n_runs = most_parts(layout.combine_msg_bytes(cfg))

    def batch(n):
        """Device function (recv_buf, token, k, src, i, end) -> place; vector i and n - 1 more at distances of 32."""
        if n == 0:
            @device_fn
            def nothing(recv_buf, token, k, src, i, end):
                return place_of(recv_buf, token, k)

            return nothing
        others = batch(n - 1)

        @device_fn
        def move(recv_buf, token, k, src, i, end):
            # Past the end the last vector is read again and not stored: no branch comes between the loads.
            q = load16_nc(src + u64(VECTOR) * u64(min(i, i32(end - 1))))
            place = others(recv_buf, token, k, src, i32(i + LANES), end)
            if i < end and place != u64(0):
                store16(place + u64(VECTOR) * u64(i), q[0], q[1], q[2], q[3])
            return place

        return move

    eight, four = batch(8), batch(4)

    @device_fn
    def carry(recv_buf, src_info, src, part, n_parts, lane):
        token, k = i32(load_i32(src_info)), i32(load_i32(src_info + u64(4)))
        runs = i32((n_runs + n_parts - 1) // n_parts)
        first = i32(part * runs * LANES)
        end = i32(min(first + runs * LANES, n_vectors))
        while first + 4 * LANES < end:
            eight(recv_buf, token, k, src, i32(first + lane), end)
            first = i32(first + 8 * LANES)
        if first < end:
            four(recv_buf, token, k, src, i32(first + lane), end)

    return carry
