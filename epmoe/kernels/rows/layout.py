"""Layout: which number a token's row has among those that this rank sends to a rank; the order of tokens, on every run.

A sending block takes a run of consecutive tokens, a warp a run inside it. Each block tells the others of its rank how
many it has for whom (`columns`), adds up what those before it told, and numbers its tokens. A told word says itself
that it is of this call, so nothing is fenced and no barrier of the grid is needed.
"""

from typing import NamedTuple

from epmoe.device import (SIM, any_lane, ballot, block_dim, block_idx, device_fn, i32, int32, lane_id,
                          ld_relaxed_gpu_u64, load_u64, n_warps, popc, red_add_release_gpu_i32, shared_add_i32,
                          shared_array, st_relaxed_gpu_u64, store_i32, syncthreads, syncthreads_or, syncwarp,
                          thread_idx, u32, u64, warp_id, warp_inclusive_sum_i32)

from ..spin import wait_for_own_blocks
from . import control, roles, routing, waits
from .status import FOR_BLOCKS

MAX_WARPS = 32
FEW = 6 if SIM else 128     # tokens that every block looks at, a thread at one


class Layout(NamedTuple):
    """Device functions made for one kernel; scratch: what allocate() gives.

    allocate() -> shared int32 arrays (by_warp [warp, rank], experts, before, totals [columns], masks [tokens]).
    count(params, epoch, num_tokens, failed, scratch): the first step of blocks that send and of the clerk; whether all
    blocks of this rank came. totals: tokens for each rank and, expert-major, for each expert. number(params, epoch,
    num_tokens, scratch): writes row_of [T, R] (-1 where the token does not go), expert-major also slot_of [T, E], each
    block those of its tokens; other warps may read them behind the block's next barrier, and, where blocks share
    tokens, a warp those of other blocks behind await_numbers(params, epoch, lane) -> whether all have numbered theirs.
    sum_experts(params, epoch, num_tokens, scratch): of the clerk; whether the sums of tokens by expert, of all blocks,
    are in experts, behind a barrier.
    """

    allocate: callable
    count: callable
    number: callable
    await_numbers: callable
    sum_experts: callable


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


def make(shape, block, phase, goes_on):
    """The Layout of one kernel. goes_on: of waits.of_block."""
    ranks, n_experts, n_columns, expert_major = shape.n_ranks, shape.n_experts, shape.n_columns, shape.expert_major
    tokens_of_block, sending, are_shared = tokens_of(shape), roles.sending(shape), roles.sharing(shape)
    look, mask_of, count_token = (routing.ranks_of_map if expert_major else routing.ranks_of_ids)(shape, block)
    count_map, tell_map, number_map = routing.map_columns(shape, block)
    n_by_group = routing.groups_of_threads(shape) * n_experts if expert_major else n_experts
    n_by_warp, stride = MAX_WARPS * ranks, ranks + n_experts
    p_columns, p_rows, p_words = block.offset("columns"), block.offset("row_of"), block.offset("words")
    p_timeout, mask_of_token, few = block.offset("timeout_ns"), routing.mask_by_thread(shape, block), max(FEW, 1)

    @device_fn
    def allocate():
        return (shared_array(n_by_warp, int32), shared_array(n_by_group, int32), shared_array(n_columns, int32),
                shared_array(n_columns, int32), shared_array(few, int32))

    @device_fn
    def are_few(num_tokens):
        return not expert_major and num_tokens <= few

    @device_fn
    def tokens_of_warp(first, end):
        """[start, stop) of the tokens that this warp counts."""
        a_warp = i32((end - first + n_warps() - 1) // n_warps())
        start = i32(min(i32(first + warp_id() * a_warp), end))
        return start, i32(min(i32(start + a_warp), end))

    @device_fn
    def count_tokens(params, first, end, by_warp, experts):
        """by_warp [warp, rank]: of these tokens those for a rank; experts: those of each expert."""
        lane, seen, last = i32(lane_id()), i32(0), i32(0)
        token, stop = tokens_of_warp(first, end)
        while token < stop:
            last = i32(stop - 1)
            a = look(params, token, lane)       # four loads in flight
            b = look(params, i32(min(i32(token + 1), last)), lane)
            c = look(params, i32(min(i32(token + 2), last)), lane)
            d = look(params, i32(min(i32(token + 3), last)), lane)
            n = i32(0)
            while n < 4 and token + n < stop:
                value = a
                if n == 1:
                    value = b
                if n == 2:
                    value = c
                if n == 3:
                    value = d
                mask = count_token(params, value, i32(token + n), lane, experts)
                seen = i32(seen + i32(u32(mask >> u32(lane)) & u32(1)))
                n = i32(n + 1)
            token = i32(token + 4)
        if lane < ranks:
            by_warp[warp_id() * ranks + lane] = seen

    @device_fn
    def add_warps(by_warp, rank, lane):
        """The block's tokens for a rank (in lane 31); by_warp becomes those of the warps before."""
        here = i32(0)
        if lane < n_warps():
            here = i32(by_warp[lane * ranks + rank])
        up_to = i32(warp_inclusive_sum_i32(here))
        if lane < n_warps():
            by_warp[lane * ranks + rank] = i32(up_to - here)
        return up_to

    @device_fn
    def tell_ranks(columns, epoch, by_warp):
        """A warp a rank: tells the other blocks."""
        lane, rank = i32(lane_id()), i32(warp_id())
        while rank < ranks:
            up_to = add_warps(by_warp, rank, lane)
            if lane == 31:
                st_relaxed_gpu_u64(columns + u64(8) * u64(rank), waits.told(epoch, up_to))
            rank = i32(rank + n_warps())

    @device_fn
    def seen_of(params, i, n, first, per_block):
        """What the i-th of n words holds: per_block words of each block, from `first` on."""
        i = i32(min(i, n - 1))
        at = u64(i // per_block) * u64(stride) + u64(first + i % per_block)
        return u64(ld_relaxed_gpu_u64(u64(load_u64(params + u64(p_columns))) + u64(8) * at))

    @device_fn
    def add_word(params, epoch, i, n, first, per_block, seen, before, totals, with_before):
        """Adds the i-th word; whether it came. seen: what it held."""
        if i >= n:
            return True
        words, column = u64(load_u64(params + u64(p_words))), i32(i % per_block)
        at = u64(i // per_block) * u64(stride) + u64(first + column)
        word = u64(waits.wait_for_word_of_rank(
            u64(load_u64(params + u64(p_columns))) + u64(8) * at, seen, epoch, words + u64(control.STATUS),
            u64(load_u64(params + u64(p_timeout))), phase, FOR_BLOCKS, i32(i // per_block)))
        number = i32(word)
        if number != 0:
            shared_add_i32(totals, column, number)
            if with_before and i // per_block < block_idx():
                shared_add_i32(before, column, number)
        return word != u64(0)

    @device_fn
    def add_up(params, epoch, n_blocks, first, per_block, before, totals, with_before):
        """What so many blocks told, and, with_before, what those before this one did; whether all words came."""
        n, step = i32(n_blocks * per_block), i32(block_dim())
        ok, i = True, i32(thread_idx())
        while ok and i < n:
            j, k, m = i32(i + step), i32(i + 2 * step), i32(i + 3 * step)
            a, b = seen_of(params, i, n, first, per_block), seen_of(params, j, n, first, per_block)
            c, d = seen_of(params, k, n, first, per_block), seen_of(params, m, n, first, per_block)
            ok = add_word(params, epoch, i, n, first, per_block, a, before, totals, with_before)   # four in flight
            if ok:
                ok = add_word(params, epoch, j, n, first, per_block, b, before, totals, with_before)
            if ok:
                ok = add_word(params, epoch, k, n, first, per_block, c, before, totals, with_before)
            if ok:
                ok = add_word(params, epoch, m, n, first, per_block, d, before, totals, with_before)
            i = i32(i + 4 * step)
        return ok

    @device_fn
    def columns_of_block(params):
        return u64(u64(load_u64(params + u64(p_columns))) + u64(8) * u64(block_idx() * stride))

    @device_fn
    def clear(array, n):
        i = i32(thread_idx())
        while i < n:
            array[i] = i32(0)
            i = i32(i + block_dim())

    @device_fn
    def number_few(params, num_tokens, masks, totals):
        """Totals out of the masks of all tokens, a warp a rank, and the numbers of the block's own tokens."""
        lane, rank, rows = i32(lane_id()), i32(warp_id()), u64(load_u64(params + u64(p_rows)))
        own, end = tokens_of_block(num_tokens)
        while rank < ranks:
            total, first = i32(0), i32(0)
            while first < num_tokens:
                token, bit, row = i32(first + lane), u32(0), i32(-1)
                if token < num_tokens:
                    bit = u32(u32(u32(masks[token]) >> u32(rank)) & u32(1))
                go = u32(ballot(bit != u32(0)))
                if bit != u32(0):
                    row = i32(total + popc(u32(go & u32(u32(u32(1) << u32(lane)) - u32(1)))))
                if token >= own and token < end:
                    store_i32(rows + u64(4) * u64(token * ranks + rank), row)
                total, first = i32(total + popc(go)), i32(first + 32)
            if lane == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())

    @device_fn
    def count_few(params, num_tokens, failed, masks, totals):
        token = i32(thread_idx())
        while token < num_tokens:
            masks[token] = i32(mask_of_token(params, token))
            token = i32(token + block_dim())
        if not goes_on(params, failed):         # the masks of all threads
            return False
        number_few(params, num_tokens, masks, totals)
        syncthreads()
        return True

    @device_fn
    def count(params, epoch, num_tokens, failed, scratch):
        by_warp, experts, before, totals, masks = scratch
        if are_few(num_tokens):
            return count_few(params, num_tokens, failed, masks, totals)
        first, end = tokens_of_block(num_tokens)
        clear(before, n_columns)
        clear(totals, n_columns)
        if expert_major:
            count_map(params, first, end, experts)
        else:
            clear(experts, n_experts)
            syncthreads()                       # zeros before sums
        count_tokens(params, first, end, by_warp, experts)
        if not goes_on(params, failed):         # the counts of all warps
            return False
        if block_idx() < sending():
            tell_ranks(columns_of_block(params), epoch, by_warp)
            if expert_major:
                tell_map(columns_of_block(params) + u64(8 * ranks), epoch, experts)
        return not syncthreads_or(not add_up(params, epoch, sending(), i32(0), i32(n_columns), before, totals, True))

    @device_fn
    def numbered_at(params, epoch):
        words = u64(load_u64(params + u64(p_words)))
        return u64(words + u64(control.NUMBERED) + u64(4) * (u64(epoch) & u64(1)))

    @device_fn
    def tell_experts(params, epoch, experts):
        columns, expert = u64(columns_of_block(params) + u64(8 * ranks)), i32(thread_idx())
        while expert < n_experts:
            st_relaxed_gpu_u64(columns + u64(8) * u64(expert), waits.told(epoch, i32(experts[expert])))
            expert = i32(expert + block_dim())

    @device_fn
    def number_tokens(params, epoch, num_tokens, scratch):
        by_warp, experts, before, _, _ = scratch
        lane, rows = i32(lane_id()), u64(load_u64(params + u64(p_rows)))
        if not expert_major:
            tell_experts(params, epoch, experts)
        first, end = tokens_of_block(num_tokens)
        token, stop = tokens_of_warp(first, end)
        next_row = i32(0)
        if lane < ranks:
            next_row = i32(before[lane] + by_warp[warp_id() * ranks + lane])
        while token < stop:
            mask = u32(mask_of(params, look(params, token, lane), token, lane))
            if lane < ranks:
                row = i32(-1)
                if u32(mask >> u32(lane)) & u32(1) != u32(0):
                    row, next_row = next_row, i32(next_row + 1)
                store_i32(rows + u64(4) * u64(token * ranks + lane), row)
            token = i32(token + 1)
        if expert_major:
            number_map(params, first, end, experts, before, ranks)

    @device_fn
    def number(params, epoch, num_tokens, scratch):
        if not are_few(num_tokens):             # else it is done
            number_tokens(params, epoch, num_tokens, scratch)
        if are_shared(num_tokens):
            syncthreads()                       # the numbers of all warps before the block says so
            if thread_idx() == block_dim() - 1:     # the first threads wait for notes
                red_add_release_gpu_i32(numbered_at(params, epoch), i32(1))

    @device_fn
    def await_numbers(params, epoch, lane):
        ok = True
        if lane == 0:
            words = u64(load_u64(params + u64(p_words)))
            ok = wait_for_own_blocks(numbered_at(params, epoch), sending(), words + u64(control.STATUS),
                                     u64(load_u64(params + u64(p_timeout))), phase, FOR_BLOCKS, i32(0))
        failed = any_lane(not ok)
        syncwarp()                              # what lane 0 acquired, all lanes read
        return failed == 0

    @device_fn
    def sum_experts(params, epoch, num_tokens, scratch):
        by_warp, experts, before, _, _ = scratch
        if expert_major:
            return True
        if are_few(num_tokens):
            clear(experts, n_experts)
            syncthreads()                       # zeros before sums
            count_tokens(params, i32(0), i32(num_tokens), by_warp, experts)
            syncthreads()
            return True
        senders = sending()
        a_block = i32(max(1, (num_tokens + senders - 1) // senders))
        n_blocks = i32((num_tokens + a_block - 1) // a_block)
        ok = add_up(params, epoch, n_blocks, i32(ranks), i32(n_experts), before, experts, False)
        return not syncthreads_or(not ok)

    return Layout(allocate, count, number, await_numbers, sum_experts)
