"""Layout: the number of a token's row among the rows that this rank sends to a rank; always in the order of tokens.

A sending block numbers a run of consecutive tokens, and each of its warps a run inside it. Each block publishes to the
blocks of its rank how many tokens it has for each rank (columns), sums the counts of the blocks before it, and numbers
its tokens. The leader block sums all blocks' counts, first by rank, as all peers wait for these, then by expert.
"""

from typing import NamedTuple

from epmoe.device import (ballot, block_dim, block_idx, device_fn, fence_acq_rel_gpu, i32, int32, lane_id,
                          ld_relaxed_gpu_u64, load_i32, n_warps, popc, red_add_release_gpu_i32, shared_add_i32,
                          shared_array, shfl_idx, st_relaxed_gpu_u64, store_i32, syncthreads_or, thread_idx, u32, u64,
                          warp_id, warp_inclusive_sum_i32, warp_or_u32, warp_sum_i32)

from ..bits import below, divided_up, folded, has, share, split
from ..params import by_threads, by_warps, clear
from . import call as calls
from . import mailbox, routing, wait
from .shape import namespace, p

MAX_WARPS = 32
IN_FLIGHT = 8           # words of columns that a thread asks for together


class Scratch(NamedTuple):
    """Shared int32 arrays of a block.

    by_warp [warp, rank]: tokens, then sums over earlier warps. experts: tokens by expert, in expert-major by (group of
    threads, expert). totals: tokens by rank, then by expert; of all blocks (leader block) or of those before.
    """

    by_warp: object
    experts: object
    totals: object


def row_of(ranks):
    """Device function (at, token, lane) -> number of a token's row among those for rank `lane`, -1 for none.

    at: address of row_of [T, R].
    """
    return device_fn(lambda at, token, lane: i32(load_i32(u64(at) + u64(4) * u64(token * ranks + lane))) if lane < ranks
                     else i32(-1))


def allocating(shape):
    """Device function () -> Scratch."""
    groups = routing.groups_of_threads(shape) if shape.expert_major else 1
    n_by_warp, n_by_group = MAX_WARPS * shape.n_ranks, groups * shape.num_experts
    n_columns = shape.n_ranks + shape.num_experts
    return device_fn(lambda: Scratch(shared_array(n_by_warp, int32), shared_array(n_by_group, int32),
                                     shared_array(n_columns, int32)))


def sharing(shape):
    """Namespace of device functions (num_tokens): how the blocks that send divide a rank's tokens.

    of_block -> [first, end) of the tokens that this block numbers; empty for the leader block. are_claimed: whether
    warps claim parts of all blocks' tokens to send; else each block has one token or none. begin_with_own: whether a
    warp first sends parts of a token of its own block, which needs no wait. It does if tokens are claimed and each has
    a warp. If rows are expanded while they arrive, they are sent in order from the start.
    """
    num_senders, in_order = calls.num_senders, shape.expert_major

    of_block = device_fn(lambda num_tokens:
                         share(i32(0), i32(num_tokens), divided_up(num_tokens, num_senders()), i32(block_idx())))
    are_claimed = device_fn(lambda num_tokens: num_tokens > num_senders())
    begin_with_own = device_fn(lambda num_tokens:
                               not in_order and are_claimed(num_tokens) and num_tokens <= num_senders() * n_warps())

    return namespace("tokens", of_block=of_block, are_claimed=are_claimed, begin_with_own=begin_with_own)


def columns(shape):
    """Exchanges counts between the blocks of a rank: a word for each sending block and column, and their sums.

    The columns are the ranks, followed by the experts. Each word is its own ready flag, so no grid barrier is needed.
    publish(call, column, number): stores this block's word. sum_up(call, column, first, step, end): sums the words of
    blocks first, first + step, ... below `end`, waiting for them -> (whether all came, the sum).
    """
    a_block, what = 8 * (shape.n_ranks + shape.num_experts), (wait.ROWS_DISPATCH, wait.FOR_BLOCKS)

    @device_fn
    def publish(call, column, number):
        at = call.params[p.columns] + u64(8) * u64(column) + u64(a_block) * u64(i32(block_idx()))
        st_relaxed_gpu_u64(at, wait.tagged(call.epoch, number))

    @device_fn
    def look(given, k):
        at, i, step, end, _ = given
        i = i32(i + k * step)
        return u64(ld_relaxed_gpu_u64(at + u64(a_block) * u64(i))) if i < end else u64(0)

    @device_fn
    def add(total, given, k, word):
        (_, i, step, end, epoch), (all_come, n) = given, total
        if i32(i + k * step) < end:
            all_come, n = all_come and u32(word >> u64(32)) == u32(epoch), i32(n + i32(word))
        return all_come, n

    sum_of_words = folded(IN_FLIGHT, look, add)

    @device_fn
    def sum_up(call, column, first, step, end):
        at, ok, total, i = u64(call.params[p.columns] + u64(8) * u64(column)), True, i32(0), i32(first)
        while ok and i < end:
            all_come, n_added = sum_of_words((at, i, i32(step), i32(end), call.epoch), (True, i32(0)))
            if all_come:
                total, i = i32(total + n_added), i32(i + IN_FLIGHT * step)
            else:                               # waits until all blocks have stored the words that are added together
                n, k = i32(0), i
                while ok and n < IN_FLIGHT and k < end:
                    ok, _ = wait.for_word_of_rank(call.params, u64(at + u64(a_block) * u64(k)), call.epoch, what, k)
                    n, k = i32(n + 1), i32(k + step)
        return ok, total

    return namespace("columns", publish=publish, sum_up=sum_up)


def _over_tokens_of_warp(shape, unit, walk):
    """Device functions (count, number) over a block's tokens [first, end), of which each warp takes whole units.

    walk: device function (params, tokens, numbered, writes) -> rows numbered after the tokens [start, stop), in lane r
    the rows for rank r. `numbered` is the number before them. It writes row_of if `writes`.
    count(params, first, end, by_warp): sets by_warp [warp, rank], the warp's tokens for a rank. number(params, first,
    end, by_warp, totals): writes row_of. by_warp then holds sums over earlier warps, totals[rank] over earlier blocks.
    """
    ranks = shape.n_ranks

    @device_fn
    def tokens_of_warp(first, end):
        units = divided_up(i32(end - first), unit)
        return share(first, end, i32(divided_up(units, n_warps()) * unit), warp_id())

    @device_fn
    def count(params, first, end, by_warp):
        seen = walk(params, tokens_of_warp(first, end), i32(0), False)
        if lane_id() < ranks:
            by_warp[warp_id() * ranks + lane_id()] = seen

    @device_fn
    def number(params, first, end, by_warp, totals):
        begin = i32(totals[lane_id()] + by_warp[warp_id() * ranks + lane_id()]) if lane_id() < ranks else i32(0)
        walk(params, tokens_of_warp(first, end), begin, True)

    return count, number


def _numbering_ids(shape):
    """_over_tokens_of_warp for tokens with ids; a thread reads a token."""
    ranks, mask_of_token = shape.n_ranks, routing.mask_by_thread(shape)

    @device_fn
    def walk(params, tokens, numbered, writes):
        lane, (start, stop) = i32(lane_id()), tokens
        while start < stop:
            token, rank = i32(start + lane), i32(0)
            mask = u32(mask_of_token(params[p.ids], token)) if token < stop else u32(0)
            while rank < ranks:
                goes = u32(ballot(has(mask, rank)))     # the lanes whose tokens go to the rank
                if writes:
                    row = i32(shfl_idx(numbered, rank) + popc(u32(goes & below(lane))))
                    if token < stop:
                        store_i32(params[p.row_of] + u64(4) * u64(token * ranks + rank), row if has(goes, lane) else i32(-1))
                numbered = i32(numbered + popc(goes)) if lane == rank else numbered
                rank = i32(rank + 1)
            start = i32(start + 32)
        return numbered

    return _over_tokens_of_warp(shape, 32, walk)


def _numbering_map(shape):
    """_over_tokens_of_warp for tokens of a routing map; a warp reads a token."""
    ranks, ranks_of_token = shape.n_ranks, routing.ranks_of_token(shape)

    @device_fn
    def walk(params, tokens, numbered, writes):
        lane, (token, stop) = i32(lane_id()), tokens
        while token < stop:
            mask, row = warp_or_u32(ranks_of_token(params[p.ids], token, lane)), i32(-1)
            if has(mask, lane):
                row, numbered = numbered, i32(numbered + 1)
            if writes and lane < ranks:
                store_i32(params[p.row_of] + u64(4) * u64(token * ranks + lane), row)
            token = i32(token + 1)
        return numbered

    return _over_tokens_of_warp(shape, 1, walk)


def counter(shape):
    """Namespace of device functions by which warps wait until all blocks that send have numbered their tokens.

    signal(call): a block has numbered its tokens; called after a barrier. It does nothing if tokens are not claimed and
    rows not expanded, as no warp waits then. wait_for(call, lane) -> whether all came; this warp may read all numbers.
    """
    tokens, expands = sharing(shape), shape.expert_major

    numbered_at = device_fn(lambda call:
                            u64(call.params[p.words] + u64(mailbox.NUMBERED) + u64(4) * (u64(call.epoch) & u64(1))))

    @device_fn
    def signal_numbered(call):
        if (expands or tokens.are_claimed(call.num_tokens)) and calls.is_last_thread():
            red_add_release_gpu_i32(numbered_at(call), i32(1))

    await_numbers = device_fn(lambda call, lane: wait.in_warp(
        lane != 0 or wait.for_blocks(call.params, numbered_at(call), calls.num_senders(), wait.ROWS_DISPATCH)))
    return namespace("numbered", signal=signal_numbered, wait_for=await_numbers)


def make(shape):
    """Namespace of device functions for the kernel of a dispatch.

    count_and_publish(call, at_entry, scratch): every block's first step, with the call's first barrier. A block counts
    its tokens, tells the others, and waits for theirs. Returns the call's number, or OVER if a wait has expired. Sets
    scratch.totals by rank. number(call, scratch) -> whether no wait expired: each sending block writes for its tokens
    row_of [T, R] (-1 where a token does not go), expert-major also row_of_expert [T, E]. All warps of the block may
    read them when it returns, other blocks' warps after wait_for of counter().
    sum_experts(call, scratch) -> whether all came: the leader block sums all blocks' tokens by expert, in
    scratch.totals after the ranks.
    """
    ranks, num_experts, expert_major = shape.n_ranks, shape.num_experts, shape.expert_major
    tokens, num_senders, numbered = sharing(shape), calls.num_senders, counter(shape)
    groups = routing.groups_of_threads(shape) if expert_major else 1
    count_ranks, number_ranks = (_numbering_map if expert_major else _numbering_ids)(shape)
    if expert_major:
        of_map = routing.map_columns(shape)
        count_of = of_map.add_groups
    else:
        count_experts = routing.experts_of_ids(shape)
        count_of = device_fn(lambda experts, expert: i32(experts[expert]))
    column, n_by_group = columns(shape), groups * num_experts

    @by_warps
    def publish_rank(rank, call, by_warp):
        """Tells the other blocks how many tokens go to the rank; by_warp becomes the sums over earlier warps."""
        lane = i32(lane_id())
        i = i32(lane * ranks + rank)
        n = i32(by_warp[i]) if lane < n_warps() else i32(0)
        up_to = i32(warp_inclusive_sum_i32(n))
        if lane < n_warps():
            by_warp[i] = i32(up_to - n)
        if lane == 31:
            column.publish(call, rank, up_to)

    @by_threads
    def publish_experts(expert, call, experts):
        """Tells the other blocks how many tokens go to the expert."""
        column.publish(call, i32(ranks + expert), count_of(experts, expert))

    # number of sending blocks before this one; for the leader block all of them
    blocks_before = device_fn(lambda: i32(min(i32(block_idx()), num_senders())))

    @device_fn
    def sum_ranks(call, totals):
        """Sums the words of earlier blocks by rank. A warp takes a rank, a lane some of the blocks."""
        lane, rank, ok, end = i32(lane_id()), i32(warp_id()), True, blocks_before()
        while rank < ranks:
            came, n = column.sum_up(call, rank, lane, i32(32), end)
            ok, total = ok and came, i32(warp_sum_i32(n))
            if lane == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())
        return ok

    @device_fn
    def add_experts(call, totals):
        """Adds the words of earlier blocks by expert to totals. A thread takes an expert and some of the blocks."""
        ok, i, end = True, i32(thread_idx()), blocks_before()
        while i < n_by_group:
            group, expert = split(i, num_experts)
            came, n = column.sum_up(call, i32(ranks + expert), group, i32(groups), end)
            if n != 0:
                shared_add_i32(totals, i32(ranks + expert), n)
            ok, i = ok and came, i32(i + block_dim())
        return not syncthreads_or(not ok)

    @device_fn
    def count_and_publish(call, at_entry, scratch):
        first, end = tokens.of_block(call.num_tokens)
        clear(i32(ranks + num_experts), scratch.totals)
        if expert_major:
            of_map.fetch(call.params, first, end)
            of_map.count(of_map.n, call.params, first, end, scratch.experts)
        else:
            clear(num_experts, scratch.experts)   # number() counts them
        count_ranks(call.params, first, end, scratch.by_warp)
        call = calls.share_epoch(call, at_entry)    # and the counts of all warps
        if calls.is_over(call):
            return u64(calls.OVER)
        if not calls.is_leader():
            publish_rank(ranks, call, scratch.by_warp)
            if expert_major:
                publish_experts(num_experts, call, scratch.experts)
        return u64(calls.OVER) if syncthreads_or(not sum_ranks(call, scratch.totals)) else call.epoch

    @device_fn
    def number(call, scratch):
        (first, end), is_bad = tokens.of_block(call.num_tokens), False
        number_ranks(call.params, first, end, scratch.by_warp, scratch.totals)
        if expert_major:
            if not add_experts(call, scratch.totals):
                return False
            of_map.number(of_map.n, call.params, first, end, scratch.experts, scratch.totals, ranks)
        else:
            is_bad = count_experts(call.params, call.params[p.ids], first, end, scratch.experts)
        if syncthreads_or(is_bad):              # the numbers and counts of all warps
            fence_acq_rel_gpu()                 # bad ids recorded, before the counts that the leader block awaits
        numbered.signal(call)
        if not expert_major:
            publish_experts(num_experts, call, scratch.experts)
        return True

    sum_experts = device_fn(lambda call, scratch: add_experts(call, scratch.totals))

    return namespace("layout", count_and_publish=count_and_publish, number=number, sum_experts=sum_experts)
