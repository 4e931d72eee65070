"""Entries of combine dealt out whole: a block sends all rows of an entry, (local expert, source rank), and signals it.

So no entry waits for two blocks, and one release covers all that a block has sent. A release waits until all that its
multiprocessor has sent is acknowledged; so a rank's own rows are other blocks' work than those for peers, and are known
long before these. For rounds whose rows are all on their way at once, and whose entries are small: where one is large,
its block would be the last one by far.
"""

from epmoe.device import (block_dim, block_idx, device_fn, grid_dim, i32, lane_id, n_warps, syncthreads, thread_idx,
                          u32, warp_id)

from .division import divided

FAR_OF_33 = {2: 24}     # by number of ranks, of 33 blocks, those that send to peers; the others have the own rows
FAR_OF_MORE = 30        # the same for more ranks, where fewer rows are own ones
MOST_ROWS = 32          # of an entry
MOST_ENTRIES = 16       # of a block, on average


def far_blocks(cfg):
    """Device function () -> the number of blocks, the first ones, that send to peers."""
    ranks = cfg.n_src_ranks
    of_33 = FAR_OF_33.get(ranks, FAR_OF_MORE)

    @device_fn
    def blocks():
        n = i32(0)
        if ranks > 1:
            n = i32(max(i32(1), divided(i32(grid_dim() * of_33), i32(33))))
        return n

    return blocks


def make(cfg, pieces):
    """(applies, send), device functions for all blocks.

    applies(n, is_small): whether n rows are sent like this; is_small: no entry has more than MOST_ROWS.
    send(params, rows, src_infos, my_rank, ends, counts): pieces: RowPieces; ends, counts: of all entries, as in
    row_runs.py. Signals all entries that have rows. Ends behind a barrier.
    """
    cut, carry, signal = pieces.cut, pieces.carry, pieces.signal
    ranks, local, keeps_own, blocks_for_peers = cfg.n_src_ranks, cfg.n_local_experts, cfg.skip_a2a, far_blocks(cfg)
    n_entries, others = local * ranks, max(1, ranks - 1)

    @device_fn
    def applies(n, is_small):
        return is_small and n > grid_dim() and n <= grid_dim() * n_warps() and n_entries <= MOST_ENTRIES * grid_dim()

    @device_fn
    def share(my_rank):
        """This block's items [first, end), and whether they are own entries: the i-th of these, or of the others."""
        n_far, at, n_items = blocks_for_peers(), i32(block_idx()), i32(local * (ranks - 1))
        n_blocks, is_own = n_far, at >= n_far
        if is_own:
            at, n_blocks, n_items = i32(at - n_far), i32(grid_dim() - n_far), i32(local)
        return divided(i32(at * n_items), n_blocks), divided(i32((at + 1) * n_items), n_blocks), is_own

    @device_fn
    def entry_at(item, is_own, my_rank):
        """The entry that is this item; they go by local expert, and by rank."""
        entry = i32(item)
        if not keeps_own:
            if is_own:
                entry = i32(item * ranks + my_rank)
            else:
                expert = i32(u32(item) // u32(others))
                source = i32(item - expert * others)
                entry = i32(expert * ranks + source + i32(source >= my_rank))
        return entry

    @device_fn
    def send_rows(params, rows, src_infos, my_rank, ends, counts, first, n_rows, is_own):
        n_parts, n_vectors = cut(n_rows)
        lane, unit = i32(lane_id()), i32(warp_id())
        while unit < n_rows * n_parts:
            at_row, item = divided(unit, n_parts), i32(first)
            part = i32(unit - at_row * n_parts)
            entry = entry_at(item, is_own, my_rank)
            while at_row >= counts[entry]:
                at_row, item = i32(at_row - counts[entry]), i32(item + 1)
                entry = entry_at(item, is_own, my_rank)
            row, at_vector = i32(ends[entry] - counts[entry] + at_row), i32(part * n_vectors)
            carry(params, rows, src_infos, row, entry, at_row, part, at_vector, i32(at_vector + n_vectors), my_rank,
                  lane)
            unit = i32(unit + n_warps())

    @device_fn
    def send(params, rows, src_infos, my_rank, ends, counts):
        first, end, is_own = share(my_rank)
        n_rows, item = i32(0), first
        while item < end:
            n_rows, item = i32(n_rows + counts[entry_at(item, is_own, my_rank)]), i32(item + 1)
        send_rows(params, rows, src_infos, my_rank, ends, counts, first, n_rows, is_own)
        syncthreads()                   # all pieces by all warps, before the signals release them
        item = i32(first + thread_idx())
        while item < end:
            entry = entry_at(item, is_own, my_rank)
            if counts[entry] > 0:
                signal(params, entry, my_rank, i32(counts[entry]))
            item = i32(item + block_dim())

    return applies, send
