"""Entries of combine dealt out whole: a block sends all rows of an entry, (local expert, source rank), and signals it.

So no entry waits for two blocks, and one release covers all that a block has sent. A release waits until all that its
multiprocessor has sent is acknowledged; so a rank's own rows are other blocks' work than those for peers, and are known
long before these. For rounds whose rows are all on their way at once, and whose entries are small: where one is large,
its block would be the last one by far.
"""

from epmoe.device import block_dim, device_fn, grid_dim, i32, lane_id, n_warps, syncthreads, thread_idx, warp_id

MOST_ROWS = 32          # of an entry


def make(cfg, pieces, shares):
    """(applies, send), device functions for all blocks.

    applies(n, is_small): whether n rows are sent like this; is_small: no entry has more than MOST_ROWS.
    send(params, rows, src_infos, my_rank, ends, counts, share): pieces: RowPieces; shares, share: BlockShares; ends,
    counts: of all entries, as in row_runs.py. Signals all entries that have rows. Ends behind a barrier.
    """
    carry, signal, n_entries, entry_at, cut, row_of = (pieces.carry, pieces.signal, shares.n_entries, shares.entry,
                                                       shares.cut, shares.row_of)
    fits = shares.fits

    @device_fn
    def applies(n, is_small):
        return is_small and n > grid_dim() and n <= grid_dim() * n_warps() and fits()

    @device_fn
    def send_rows(params, rows, src_infos, my_rank, ends, counts, share):
        n_rows, i = i32(0), i32(0)
        while i < n_entries(share):
            n_rows, i = i32(n_rows + counts[entry_at(share, i)]), i32(i + 1)
        n_parts, n_vectors, scale = cut(share, n_rows)
        lane, unit = i32(lane_id()), i32(warp_id())
        while unit < n_rows * n_parts:
            at_row, i = row_of(unit, scale), i32(0)
            part = i32(unit - at_row * n_parts)
            entry = entry_at(share, i)
            while at_row >= counts[entry]:
                at_row, i = i32(at_row - counts[entry]), i32(i + 1)
                entry = entry_at(share, i)
            row, at_vector = i32(ends[entry] - counts[entry] + at_row), i32(part * n_vectors)
            carry(params, rows, src_infos, row, entry, at_row, part, at_vector, i32(at_vector + n_vectors), my_rank,
                  lane)
            unit = i32(unit + n_warps())

    @device_fn
    def send(params, rows, src_infos, my_rank, ends, counts, share):
        send_rows(params, rows, src_infos, my_rank, ends, counts, share)
        syncthreads()                   # all pieces by all warps, before the signals release them
        i = i32(thread_idx())
        while i < n_entries(share):
            entry = entry_at(share, i)
            if counts[entry] > 0:
                signal(params, entry, my_rank, i32(counts[entry]))
            i = i32(i + block_dim())

    return applies, send
