"""Assigns rows of combine in runs: a block takes consecutive rows, whatever segments they belong to.

So blocks have equal shares. Most segments are one block's work: its warps count their pieces in shared memory, no warp
waits for the arrival of a piece before it sends the next, and the last warp signals for all. Only segments that span
several blocks are counted in device memory.
"""

from epmoe.device import (atomic_add_acq_rel_gpu_i32, ballot, block_idx, device_fn, fence_acq_rel_cta, ffs, grid_dim,
                          i32, lane_id, n_warps, shared_add_i32, store_i32, syncwarp, u32, u64, warp_id)

from . import counters
from .division import divided
from .formats.row_copy import LANES

SENDERS_OF_11 = 8   # of 11 blocks, those that send where their warps can send all rows at once: as fast on the links


def make(cfg, pieces):
    """Device function send(params, words, rows, src_infos, first, here, my_rank, ends, counts, done), by all blocks.

    pieces: RowPieces. For the window of entries [first, first + here) of region A: ends, counts: int32 [here] of each,
    in shared memory; done: zeros, or anything if there are no signals. Signals all entries that have rows.
    """
    at = counters.words(cfg)
    cut, ask, send_piece, signal, signals = pieces.cut, pieces.ask, pieces.send, pieces.signal, pieces.signals

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
                signal(params, entry, my_rank, count)

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
    def sending_blocks(n):
        """How many blocks share n rows: fewer than there are where all rows are on their way at once."""
        blocks = grid_dim()
        if n > blocks and n <= blocks * n_warps():
            blocks = i32(max(i32(1), divided(i32(blocks * SENDERS_OF_11), i32(11))))
        return blocks

    @device_fn
    def send(params, words, rows, src_infos, first, here, my_rank, ends, counts, done):
        start, n, lane = i32(ends[0] - counts[0]), i32(ends[here - 1] - ends[0] + counts[0]), i32(lane_id())
        blocks = sending_blocks(n)
        each = divided(n, blocks)
        more = i32(n - each * blocks)
        low = i32(start + block_idx() * each + min(block_idx(), more))
        n_rows = i32((each + i32(block_idx() < more)) * i32(block_idx() < blocks))
        n_parts, n_vectors = cut(n_rows)
        unit = i32(warp_id())
        while unit < n_rows * n_parts:
            n_before = divided(unit, n_parts)
            row, part = i32(low + n_before), i32(unit - n_before * n_parts)
            at_vector = i32(part * n_vectors)
            # On their way while the warp finds out whose row it is.
            asked = ask(rows, src_infos, row, at_vector, i32(at_vector + n_vectors), lane)
            i = entry_of(ends, here, row, lane)
            end, count = i32(ends[i]), i32(counts[i])
            if row >= end - count:              # else it is a padding row between two experts
                send_piece(params, rows, asked, row, i32(first + i), i32(row - end + count), part, at_vector,
                           i32(at_vector + n_vectors), my_rank, lane)
                if signals:
                    syncwarp()                  # the piece by all lanes, before lane 0 releases it
                    if lane == 0:
                        n_here = i32(min(end, i32(low + n_rows)) - max(i32(end - count), low))
                        finish(params, words, i32(first + i), n_here, n_parts, my_rank, count, done, i)
            unit = i32(unit + n_warps())

    return send
