"""Layout: which number a token's row has among those that this rank sends to a rank; the order of tokens, on every run.

A block takes a run of consecutive tokens, a warp a run inside it. Blocks count, meet, and add up what the blocks before
them counted; then they number their tokens.
"""

from epmoe.device import (block_idx, device_fn, grid_dim, i32, int32, lane_id, load_i32, load_u64, n_warps,
                          shared_array, store_i32, syncthreads, thread_idx, u32, u64, warp_id, warp_sum_i32)

from . import routing, waits

MAX_WARPS = 32


@device_fn
def tokens_of_block(num_tokens):
    """[first, end) of this block's tokens."""
    a_block = i32((num_tokens + grid_dim() - 1) // grid_dim())
    first = i32(min(i32(block_idx() * a_block), num_tokens))
    return first, i32(min(i32(first + a_block), num_tokens))


def make(shape, block, phase):
    """Device function place_tokens(params, num_tokens, my_rank) -> whether all blocks of this rank came.

    Writes row_of [T, R] (-1 where the token does not go), expert-major also slot_of [T, E], each block those of its
    tokens, and in `totals` the tokens for each rank and the (token, slot) pairs of each expert (block 0 may read them).
    """
    ranks, n_experts, n_columns, expert_major = shape.n_ranks, shape.n_experts, shape.n_columns, shape.expert_major
    mask_of = (routing.ranks_of_map if expert_major else routing.ranks_of_ids)(shape, block)
    count_experts, number_experts = routing.map_columns(shape, block)
    _, _, meet = waits.of_block(block)
    n_by_warp = MAX_WARPS * ranks
    p_columns, p_before, p_totals, p_rows = (block.offset(n) for n in ("columns", "before", "totals", "row_of"))

    @device_fn
    def tokens_of_warp(first, end):
        a_warp = i32((end - first + n_warps() - 1) // n_warps())
        start = i32(min(i32(first + warp_id() * a_warp), end))
        return start, i32(min(i32(start + a_warp), end))

    @device_fn
    def count_tokens(params, first, end, by_warp):
        """by_warp [warp, rank]: tokens of the warps before; the block's sum goes to `columns`."""
        lane, tid = i32(lane_id()), i32(thread_idx())
        start, stop = tokens_of_warp(first, end)
        seen, token = i32(0), i32(start)
        while token < stop:
            seen = i32(seen + i32(u32(mask_of(params, token, lane, True) >> u32(lane)) & u32(1)))
            token = i32(token + 1)
        if lane < ranks:
            by_warp[warp_id() * ranks + lane] = seen
        if expert_major:
            count_experts(params, first, end)
        syncthreads()                           # the counts of all warps
        if tid < ranks:
            total, w = i32(0), i32(0)
            while w < n_warps():
                here = i32(by_warp[w * ranks + tid])
                by_warp[w * ranks + tid] = total
                total, w = i32(total + here), i32(w + 1)
            columns = u64(load_u64(params + u64(p_columns)))
            store_i32(columns + u64(4) * u64(tid * grid_dim() + block_idx()), total)

    @device_fn
    def add_up(params, before_ranks):
        """What the blocks before this one counted, a warp a column; block 0 also writes the sums over all."""
        columns, before_experts = u64(load_u64(params + u64(p_columns))), u64(load_u64(params + u64(p_before)))
        totals, lane, column = u64(load_u64(params + u64(p_totals))), i32(lane_id()), i32(warp_id())
        while column < n_columns:
            before, total, b = i32(0), i32(0), i32(lane)
            while b < grid_dim():
                n = i32(load_i32(columns + u64(4) * u64(column * grid_dim() + b)))
                total = i32(total + n)
                if b < block_idx():
                    before = i32(before + n)
                b = i32(b + 32)
            before, total = i32(warp_sum_i32(before)), i32(warp_sum_i32(total))
            if lane == 0:
                if column < ranks:
                    before_ranks[column] = before
                else:
                    store_i32(before_experts + u64(4) * u64(block_idx() * n_experts + column - ranks), before)
                if block_idx() == 0:
                    store_i32(totals + u64(4) * u64(column), total)
            column = i32(column + n_warps())

    @device_fn
    def number_tokens(params, first, end, by_warp, before_ranks):
        lane, rows = i32(lane_id()), u64(load_u64(params + u64(p_rows)))
        start, stop = tokens_of_warp(first, end)
        number, token = i32(0), i32(start)
        if lane < ranks:
            number = i32(before_ranks[lane] + by_warp[warp_id() * ranks + lane])
        while token < stop:
            mask = u32(mask_of(params, token, lane, False))
            if lane < ranks:
                row = i32(-1)
                if u32(mask >> u32(lane)) & u32(1) != u32(0):
                    row, number = number, i32(number + 1)
                store_i32(rows + u64(4) * u64(token * ranks + lane), row)
            token = i32(token + 1)
        if expert_major:
            number_experts(params, first, end)

    @device_fn
    def place_tokens(params, num_tokens, my_rank):
        by_warp, before_ranks = shared_array(n_by_warp, int32), shared_array(ranks, int32)
        first, end = tokens_of_block(num_tokens)
        count_tokens(params, first, end, by_warp)
        if not meet(params, phase):
            return False
        add_up(params, before_ranks)
        syncthreads()                           # sums of all columns before they are used
        number_tokens(params, first, end, by_warp, before_ranks)
        syncthreads()                           # row_of and totals before this block reads them
        return True

    return place_tokens
