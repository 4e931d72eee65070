"""What a block of combine sends of whole entries, as far as it can be known before region A is.

Which entries are a block's depends on the launch, and how rows are cut on their number. One warp writes both into
shared memory while the words of region A are on their way. Behind the barrier the warps find their pieces by a few
look-ups; else each would work it all out, by 450 instructions with five divisions between A and its first load.
"""

from typing import NamedTuple

from epmoe.device import block_dim, block_idx, device_fn, grid_dim, i32, thread_idx, u32

from .division import divided

FAR_OF_33 = {2: 24}     # by number of ranks, of 33 blocks, those that send to peers; the others have the own rows
FAR_OF_MORE = 30        # the same for more ranks, where fewer rows are own ones
MOST = 32               # entries of a block; rows of a block that sends some in parts: there is a warp for each


class BlockShares(NamedTuple):
    """Device functions; share: int32 [n_words] of a block, in shared memory.

    write(share, my_rank): by all threads, a barrier before the others.
    fits(): whether no block of the launch has more than MOST entries.
    n_entries(share), entry(share, i): the block's entries, (local expert, source rank); they go by local expert, and
        by rank.
    cut(share, n_rows) -> (n_parts, vectors of a part, scale): RowPieces.cut.
    row_of(unit, scale): unit // n_parts, of a unit below n_rows * n_parts.
    """

    n_words: int
    write: callable
    fits: callable
    n_entries: callable
    entry: callable
    cut: callable
    row_of: callable


def make(cfg, cut_of) -> BlockShares:
    """cut_of: RowPieces.cut."""
    ranks, local, keeps_own = cfg.n_src_ranks, cfg.n_local_experts, cfg.skip_a2a
    of_33, others = FAR_OF_33.get(ranks, FAR_OF_MORE), max(1, ranks - 1)
    at_parts, at_vectors, at_scale = 1 + MOST, 1 + 2 * MOST, 1 + 3 * MOST

    @device_fn
    def far_blocks():
        """The number of blocks, the first ones, that send to peers."""
        n = i32(0)
        if ranks > 1:
            n = i32(max(i32(1), divided(i32(grid_dim() * of_33), i32(33))))
        return n

    @device_fn
    def fits():
        n_far = far_blocks()
        return local * (ranks - 1) <= MOST * n_far and local <= MOST * (grid_dim() - n_far)

    @device_fn
    def bounds(my_rank):
        """This block's items [first, end), and whether they are own entries: the i-th of these, or of the others."""
        n_far, at, n_items = far_blocks(), i32(block_idx()), i32(local * (ranks - 1))
        n_blocks, is_own = n_far, at >= n_far
        if is_own:
            at, n_blocks, n_items = i32(at - n_far), i32(grid_dim() - n_far), i32(local)
        return divided(i32(at * n_items), n_blocks), divided(i32((at + 1) * n_items), n_blocks), is_own

    @device_fn
    def entry_at(item, is_own, my_rank):
        """The entry that is this item."""
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
    def write(share, my_rank):
        i = i32(block_dim() - 1 - thread_idx())         # the last warp: the first ones have region A to look at
        if i < MOST:
            first, end, is_own = bounds(my_rank)
            if i == 0:
                share[0] = i32(min(i32(end - first), i32(MOST)))
            if first + i < end:
                share[1 + i] = entry_at(i32(first + i), is_own, my_rank)
            n_parts, n_vectors = cut_of(i32(i + 1))
            share[at_parts + i], share[at_vectors + i] = n_parts, n_vectors
            share[at_scale + i] = divided(i32(65535 + n_parts), n_parts)

    @device_fn
    def n_entries(share):
        return i32(share[0])

    @device_fn
    def entry(share, i):
        return i32(share[1 + i])

    @device_fn
    def cut(share, n_rows):
        known = i32(max(i32(0), i32(min(n_rows, i32(MOST)) - 1)))       # so many rows are sent whole, as more are
        return i32(share[at_parts + known]), i32(share[at_vectors + known]), i32(share[at_scale + known])

    @device_fn
    def row_of(unit, scale):
        return i32(u32(unit) * u32(scale) >> u32(16))

    return BlockShares(1 + 4 * MOST, write, fits, n_entries, entry, cut, row_of)
