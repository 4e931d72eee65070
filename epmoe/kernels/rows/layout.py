"""Layout: which number a token's row has among those that this rank sends to a rank; the order of tokens, on every run.

A sending block takes a run of consecutive tokens, a warp a run inside it. Each block tells the others of its rank how
many it has for whom (`columns`), adds up what those before it told, and numbers its tokens. A told word says itself
that it is of this call, so nothing is fenced and no barrier of the grid is needed.
"""

from typing import NamedTuple

from epmoe.device import (block_dim, block_idx, device_fn, i32, lane_id, ld_relaxed_gpu_u64, load_u64,
                          n_warps, shared_add_i32, shared_array, st_relaxed_gpu_u64, store_i32, syncthreads_or,
                          thread_idx, u32, u64, int32, warp_id, warp_inclusive_sum_i32)

from . import control, roles, routing, waits
from .status import FOR_BLOCKS

MAX_WARPS = 32


class Layout(NamedTuple):
    """Device functions made for one kernel; before, totals: shared int32 arrays, one number a column.

    count(params, epoch, num_tokens, by_warp, before, totals): the first step of every block; whether all blocks of this
    rank came. totals: tokens for each rank and, expert-major, for each expert. number(params, num_tokens, by_warp,
    before): writes row_of [T, R] (-1 where the token does not go), expert-major also slot_of [T, E], each block those
    of its tokens; other warps may read them behind the block's next barrier.
    """

    count: callable
    number: callable


def by_warp_numbers(shape):
    """Numbers of the shared array by_warp: tokens of each warp for each rank."""
    return MAX_WARPS * shape.n_ranks


def tokens_of(shape):
    """Device function (num_tokens) -> [first, end) of this block's tokens; none for blocks that do not send."""
    sending = roles.sending(shape)

    @device_fn
    def tokens_of_block(num_tokens):
        senders = sending()
        a_block = i32((num_tokens + senders - 1) // senders)
        first = i32(min(i32(block_idx() * a_block), num_tokens))
        return first, i32(min(i32(first + a_block), num_tokens))

    return tokens_of_block


@device_fn
def tokens_of_warp(first, end):
    """[start, stop) of this warp's tokens, of those of its block."""
    a_warp = i32((end - first + n_warps() - 1) // n_warps())
    start = i32(min(i32(first + warp_id() * a_warp), end))
    return start, i32(min(i32(start + a_warp), end))


def make(shape, block, phase, goes_on):
    """The Layout of one kernel. goes_on: of waits.of_block."""
    ranks, n_columns, expert_major = shape.n_ranks, shape.n_columns, shape.expert_major
    tokens_of_block, sending = tokens_of(shape), roles.sending(shape)
    mask_of = (routing.ranks_of_map if expert_major else routing.ranks_of_ids)(shape, block)
    count_experts, number_experts = routing.map_columns(shape, block)
    p_columns, p_rows, p_words = block.offset("columns"), block.offset("row_of"), block.offset("words")
    p_timeout = block.offset("timeout_ns")

    @device_fn
    def count_tokens(params, epoch, first, end, by_warp):
        """by_warp [warp, rank]: this block's tokens."""
        lane, seen = i32(lane_id()), i32(0)
        token, stop = tokens_of_warp(first, end)
        while token < stop:
            seen = i32(seen + i32(u32(mask_of(params, token, lane, True) >> u32(lane)) & u32(1)))
            token = i32(token + 1)
        if lane < ranks:
            by_warp[warp_id() * ranks + lane] = seen

    @device_fn
    def tell_ranks(columns, epoch, by_warp):
        """The block's tokens for each rank; by_warp becomes those of the warps before. A warp a rank."""
        lane, rank = i32(lane_id()), i32(warp_id())
        while rank < ranks:
            here = i32(0)
            if lane < n_warps():
                here = i32(by_warp[lane * ranks + rank])
            up_to = i32(warp_inclusive_sum_i32(here))
            if lane < n_warps():
                by_warp[lane * ranks + rank] = i32(up_to - here)
            if lane == 31:
                st_relaxed_gpu_u64(columns + u64(8) * u64(rank), waits.told(epoch, up_to))
            rank = i32(rank + n_warps())

    @device_fn
    def add_word(params, epoch, i, n, seen, before, totals):
        """Adds the i-th of all n words; whether it came. seen: what it held."""
        if i >= n:
            return True
        words = u64(load_u64(params + u64(p_words)))
        word = u64(waits.wait_for_word_of_rank(
            u64(load_u64(params + u64(p_columns))) + u64(8) * u64(i), seen, epoch, words + u64(control.STATUS),
            u64(load_u64(params + u64(p_timeout))), phase, FOR_BLOCKS, i32(i // n_columns)))
        number, column = i32(word), i32(i % n_columns)
        if number != 0:
            shared_add_i32(totals, column, number)
            if i // n_columns < block_idx():
                shared_add_i32(before, column, number)
        return word != u64(0)

    @device_fn
    def add_up(params, epoch, before, totals):
        """What all blocks told, and those before this one."""
        columns, n, step = u64(load_u64(params + u64(p_columns))), i32(sending() * n_columns), i32(block_dim())
        ok, i, last = True, i32(thread_idx()), i32(n - 1)
        while ok and i < n:
            j, k, m = i32(i + step), i32(i + 2 * step), i32(i + 3 * step)
            a = u64(ld_relaxed_gpu_u64(columns + u64(8) * u64(i)))              # four loads in flight
            b = u64(ld_relaxed_gpu_u64(columns + u64(8) * u64(min(j, last))))
            c = u64(ld_relaxed_gpu_u64(columns + u64(8) * u64(min(k, last))))
            d = u64(ld_relaxed_gpu_u64(columns + u64(8) * u64(min(m, last))))
            ok = add_word(params, epoch, i, n, a, before, totals)
            if ok:
                ok = add_word(params, epoch, j, n, b, before, totals)
            if ok:
                ok = add_word(params, epoch, k, n, c, before, totals)
            if ok:
                ok = add_word(params, epoch, m, n, d, before, totals)
            i = i32(i + 4 * step)
        return ok

    @device_fn
    def count(params, epoch, num_tokens, by_warp, before, totals):
        first, end = tokens_of_block(num_tokens)
        columns = u64(u64(load_u64(params + u64(p_columns))) + u64(8) * u64(block_idx() * n_columns))
        i = i32(thread_idx())
        while i < n_columns:
            before[i], totals[i] = i32(0), i32(0)
            i = i32(i + block_dim())
        count_tokens(params, epoch, first, end, by_warp)
        if not goes_on(params):                 # the counts of all warps, and the zeros
            return False
        if block_idx() < sending():
            tell_ranks(columns, epoch, by_warp)
            if expert_major:
                count_experts(params, first, end, columns + u64(8 * ranks), epoch)
        return not syncthreads_or(not add_up(params, epoch, before, totals))

    @device_fn
    def number(params, num_tokens, by_warp, before):
        lane, rows = i32(lane_id()), u64(load_u64(params + u64(p_rows)))
        first, end = tokens_of_block(num_tokens)
        token, stop = tokens_of_warp(first, end)
        next_row = i32(0)
        if lane < ranks:
            next_row = i32(before[lane] + by_warp[warp_id() * ranks + lane])
        while token < stop:
            mask = u32(mask_of(params, token, lane, False))
            if lane < ranks:
                row = i32(-1)
                if u32(mask >> u32(lane)) & u32(1) != u32(0):
                    row, next_row = next_row, i32(next_row + 1)
                store_i32(rows + u64(4) * u64(token * ranks + lane), row)
            token = i32(token + 1)
        if expert_major:
            number_experts(params, first, end, before, ranks)

    return Layout(count, number)
