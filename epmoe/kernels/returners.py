"""Combine's way back: rows of expert outputs to the places (token, k) of the ranks that their tokens came from.

A block takes rows that follow one another, so most entries of region A, (local expert, source rank), are one block's
work: its warps count their pieces in shared memory, nobody waits until a piece has arrived before the next one goes,
and the last warp signals for all. Only entries that reach over several blocks are counted in device memory.
"""

from epmoe import layout
from epmoe.device import (atomic_add_acq_rel_gpu_i32, ballot, block_dim, block_idx, device_fn, fence_acq_rel_cta, ffs,
                          grid_dim, i32, lane_id, load16_stream, load_i32, load_u64, n_warps, shared_add_i32,
                          shared_array, store16, store_i32, syncthreads, syncthreads_or, syncwarp, thread_idx, u32,
                          u64, warp_id)
from epmoe.device import int32
from epmoe_ref.config import READY

from . import counters, stamps, transport
from .division import divided
from .formats.row_copy import LANES, copy_part, most_parts

WINDOW = 2048       # entries of region A that a block looks at at a time, in shared memory
VECTOR = 16         # bytes
SENDERS_OF_11 = 8   # of 11 blocks, those that send where their warps can send all rows at once: as fast on the links


def make(cfg, block, mark):
    """Device function return_rows(params, words, rows, src_infos, my_rank, failed), for all blocks.

    Gives whether it had to give up. Every pair (local expert, source rank) is signalled in every round, also where no row goes back. words: the address
    of ep_counters. failed: whether this thread knows of an earlier wait that expired. Has a barrier before it sends.
    """
    at, to = counters.words(cfg), transport.make(cfg, block)
    recv_buf, crosses, is_far, put, complete, signal = (to.recv_buf, to.crosses, to.is_far, to.put, to.complete,
                                                        to.signal)
    bytes_a_row = layout.combine_msg_bytes(cfg)
    place_of, most = _placing(cfg), most_parts(bytes_a_row)
    stage, n_vectors = copy_part(bytes_a_row, read_only=True), bytes_a_row // VECTOR
    ask, deliver = _carrying(n_vectors)
    ranks, tokens_per_rank, keeps_own = cfg.n_src_ranks, cfg.max_tokens_per_rank, cfg.skip_a2a
    n_entries = cfg.n_local_experts * ranks
    window = min(WINDOW, n_entries)
    p_send = block.offset("send_buf_p")

    @device_fn
    def rank_in(entry):
        return i32(u32(entry) % u32(ranks))

    @device_fn
    def rank_of(entry, my_rank):
        rank = rank_in(entry)
        if keeps_own:
            rank = i32(my_rank)
        return rank

    @device_fn
    def signal_entry(params, entry, my_rank, count):
        source = i32(my_rank)
        if keeps_own:
            source = i32(0)
        signal(params, rank_of(entry, my_rank), my_rank, i32(entry - rank_in(entry) + source), count)

    @device_fn
    def finish(params, words, entry, n_here, n_parts, my_rank, count, done, i):
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
                signal_entry(params, entry, my_rank, count)

    @device_fn
    def entry_of(ends, here, row, lane):
        """The first of the window's entries that ends behind the row; entries end in ascending order."""
        step = divided(i32(here + LANES - 1), i32(LANES))
        base = i32((ffs(ballot(ends[i32(min(here, i32((lane + 1) * step)) - 1)] > row)) - 1) * step)
        found = u32(ballot(ends[min(i32(base + lane), i32(here - 1))] > row))
        while found == u32(0):
            base = i32(base + LANES)
            found = u32(ballot(ends[min(i32(base + lane), i32(here - 1))] > row))
        return i32(base + ffs(found) - 1)

    @device_fn
    def send_piece(params, row, pair, src, entry, at_row, part, first, end, my_rank, lane, held):
        """A warp sends vectors first .. end - 1 of a row, of which it holds some already; pair: its src_info."""
        rank = rank_of(entry, my_rank)
        is_near = True
        if crosses:
            is_near = not is_far(rank, my_rank)
        place = place_of(recv_buf(params, rank, my_rank), i32(u32(pair)), i32(u32(pair >> u64(32))))
        if place != u64(0):
            if is_near:
                deliver(place, src, first, end, lane, held)
            elif part == 0:     # out of send_buf, where the entry has a row for each token
                staged = u64(load_u64(params + u64(p_send))) + u64(entry * tokens_per_rank + at_row) * u64(bytes_a_row)
                stage(staged, src, 0, 1, lane)
                syncwarp()      # the row by all lanes, before the network reads it
                put(place, staged, bytes_a_row, rank)
                complete()

    @device_fn
    def sending_blocks(n):
        """How many blocks share n rows: fewer than there are where all rows are on their way at once."""
        blocks = grid_dim()
        if n > blocks and n <= blocks * n_warps():
            blocks = i32(max(i32(1), divided(i32(blocks * SENDERS_OF_11), i32(11))))
        return blocks

    @device_fn
    def return_window(params, words, rows, src_infos, first, here, my_rank, ends, counts, done):
        """This block's share of the rows of the window's entries; a warp takes pieces of rows."""
        start, n, lane = i32(ends[0] - counts[0]), i32(ends[here - 1] - ends[0] + counts[0]), i32(lane_id())
        blocks = sending_blocks(n)
        each = divided(n, blocks)
        more = i32(n - each * blocks)
        low = i32(start + block_idx() * each + min(block_idx(), more))
        n_rows = i32((each + i32(block_idx() < more)) * i32(block_idx() < blocks))
        n_parts = i32(max(i32(1), min(i32(most), divided(n_warps(), i32(max(i32(1), n_rows))))))
        n_vectors_each = i32(divided(i32(most + n_parts - 1), n_parts) * LANES)
        n_units, unit = i32(n_rows * n_parts), i32(warp_id())
        while unit < n_units:
            n_before = divided(unit, n_parts)
            row, part = i32(low + n_before), i32(unit - n_before * n_parts)
            at_vector = i32(part * n_vectors_each)
            end_vector, src = i32(min(i32(at_vector + n_vectors_each), n_vectors)), rows + u64(row) * u64(bytes_a_row)
            # On their way while the warp finds out whose row it is.
            pair, held = u64(load_u64(src_infos + u64(8) * u64(row))), ask(src, at_vector, end_vector, lane)
            i = entry_of(ends, here, row, lane)
            end, count = i32(ends[i]), i32(counts[i])
            if row >= end - count:              # else it is a padding row between two experts
                send_piece(params, row, pair, src, i32(first + i), i32(row - end + count), part, at_vector, end_vector,
                           my_rank, lane, held)
                syncwarp()                      # the piece by all lanes, before lane 0 releases it
                if lane == 0:
                    n_here = i32(min(end, i32(low + n_rows)) - max(i32(end - count), low))
                    finish(params, words, i32(first + i), n_here, n_parts, my_rank, count, done, i)
            unit = i32(unit + n_warps())

    @device_fn
    def return_rows(params, words, rows, src_infos, my_rank, failed):
        ends, counts, done = shared_array(window, int32), shared_array(window, int32), shared_array(window, int32)
        first = i32(0)
        while first < n_entries:
            here, i = i32(min(window, n_entries - first)), i32(thread_idx())
            while i < here:
                entry = words + u64(at.a) + u64(8) * u64(first + i)
                ends[i], counts[i], done[i] = i32(load_i32(entry) - READY), i32(load_i32(entry + u64(4))), 0
                i = i32(i + block_dim())
            if syncthreads_or(failed):      # the window is there
                return True
            mark(params, stamps.COUNTED)
            if block_idx() == grid_dim() - 1:
                i = i32(thread_idx())
                while i < here:
                    if counts[i] == 0:
                        signal_entry(params, i32(first + i), my_rank, i32(0))
                    i = i32(i + block_dim())
            return_window(params, words, rows, src_infos, first, here, my_rank, ends, counts, done)
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


def _carrying(n_vectors):
    """(ask, deliver): a warp copies vectors of a row, in two halves, between which it can find out where they go.

    ask(src, first, end, lane) -> a lane's vectors first + lane and more at distances of 32, as many as it holds at a
    time; deliver(place, src, first, end, lane, held) stores them and copies the rest. The loads are of a kind that the
    compiler leaves where they are: those of the read-only path it puts behind the question whether there is a place.
    """
    @device_fn
    def load(src, i, last):
        # Past the end the last vector is read again and not stored: no branch comes between the loads.
        return load16_stream(src + u64(VECTOR) * u64(min(i, last)))

    @device_fn
    def ask(src, first, end, lane):
        last, i, none = i32(min(end, n_vectors) - 1), i32(first + lane), (u32(0), u32(0), u32(0), u32(0))
        a, b, c, d, e, f, g = load(src, i, last), none, none, none, none, none, none
        if first + LANES < end:
            b, c, d = load(src, i32(i + 32), last), load(src, i32(i + 64), last), load(src, i32(i + 96), last)
            e, f, g = load(src, i32(i + 128), last), load(src, i32(i + 160), last), load(src, i32(i + 192), last)
        return a, b, c, d, e, f, g

    @device_fn
    def store(place, i, end, q):
        if i < end:
            store16(place + u64(VECTOR) * u64(i), q[0], q[1], q[2], q[3])

    @device_fn
    def store_held(place, i, end, held):
        store(place, i, end, held[0])
        store(place, i32(i + 32), end, held[1])
        store(place, i32(i + 64), end, held[2])
        store(place, i32(i + 96), end, held[3])
        store(place, i32(i + 128), end, held[4])
        store(place, i32(i + 160), end, held[5])
        store(place, i32(i + 192), end, held[6])

    @device_fn
    def deliver(place, src, first, end, lane, held):
        store_held(place, i32(first + lane), end, held)
        first = i32(first + 7 * LANES)
        while first < end:
            store_held(place, i32(first + lane), end, ask(src, first, end, lane))
            first = i32(first + 7 * LANES)

    return ask, deliver
