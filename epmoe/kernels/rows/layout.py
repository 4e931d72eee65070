"""Layout: the number of a token's row among those that this rank sends to a rank; always in the order of tokens.

A sending block takes a run of consecutive tokens, a warp a run inside it. Each block tells the others of its rank how
many it has for each rank (columns.py), sums the numbers of the blocks before it, and numbers its tokens (numbering.py).
The leader block sums the numbers of all blocks, first by rank, because all peers wait for this, then by expert. In
small batches every block reads all tokens, so blocks need not tell each other anything.
"""

from typing import NamedTuple

from epmoe.device import (any_lane, ballot, block_dim, block_idx, device_fn, i32, int32, lane_id, n_warps, popc, red_add_release_gpu_i32, shared_add_i32, shared_array, store_i32, syncthreads,
                          syncthreads_or, syncwarp, thread_idx, u32, u64, warp_id, warp_inclusive_sum_i32, warp_sum_i32)

from ..spin import wait_for_own_blocks
from . import columns, control, numbering, roles, routing
from .status import FOR_BLOCKS

MAX_WARPS = 32


class Layout(NamedTuple):
    """Device functions made for one kernel; scratch: what allocate() gives.

    allocate() -> shared int32 arrays (by_warp [warp, rank], experts, totals [columns], masks [tokens]).
    count(params, ids, begun, num_tokens, scratch): the first step of blocks that send and of the leader block -> epoch, as
    goes_on(begun) gives it; 0 also if a block that it waits for does not come. ids: address of ids or of the map.
    totals: tokens for each rank, for the leader block of all blocks, for others of those before them. look_at_few(ids, begun,
    num_tokens, scratch) -> epoch, count_few(params, num_tokens, scratch): its two halves where tokens are few, between
    which masks of all tokens' ranks are there. number(params, ids, epoch, num_tokens, scratch), of blocks that send;
    whether all is well: writes row_of [T, R] (-1 where the token does not go), expert-major also slot_of [T, E], each
    block those of its tokens. Other warps may read
    them behind the block's next barrier, and, where blocks share all tokens, a warp those of other blocks behind
    await_numbers(params, epoch, lane) -> whether all have numbered theirs. sum_experts(params, ids, epoch, num_tokens,
    scratch): of the leader block; whether the sums of tokens by expert, of all blocks, are there, behind a barrier: in
    experts, expert-major in totals, behind the ranks.
    """

    allocate: callable
    count: callable
    look_at_few: callable
    count_few: callable
    number: callable
    await_numbers: callable
    sum_experts: callable


@device_fn
def clear(array, n):
    """Zeros in the first n of a shared array, by a block."""
    i = i32(thread_idx())
    while i < n:
        array[i] = i32(0)
        i = i32(i + block_dim())


def tokens_of(shape):
    """Device function (num_tokens) -> [first, end) of this block's tokens; none for blocks that do not send."""
    sending = roles.sending(shape)

    @device_fn
    def tokens_of_block(num_tokens):
        senders, at, a_block = sending(), i32(block_idx()), i32(1)
        if num_tokens > senders:
            a_block = i32(u32(i32(num_tokens + senders - 1)) // u32(senders))
            at = i32(at * a_block)
        first = i32(min(at, num_tokens))
        return first, i32(min(i32(first + a_block), num_tokens))

    return tokens_of_block


def make(shape, block, phase, goes_on):
    """The Layout of one kernel. goes_on: of waits.of_block."""
    ranks, n_experts, n_columns, expert_major = shape.n_ranks, shape.n_experts, shape.n_columns, shape.expert_major
    tokens_of_block, sending, are_shared = tokens_of(shape), roles.sending(shape), roles.sharing(shape)
    are_few = roles.few(shape)
    groups = routing.groups_of_threads(shape) if expert_major else 1
    count_ranks, number_ranks = (numbering.by_warp if expert_major else numbering.by_thread)(shape, block)
    if expert_major:
        fetch_map, count_map, add_groups, number_map = routing.map_columns(shape, block)
    else:
        count_experts, mask_of_token = routing.experts_of_ids(shape, block), routing.mask_by_thread(shape)
    tell, sum_up = columns.make(shape, block, phase)
    n_by_warp, n_by_group, n_few = MAX_WARPS * ranks, groups * n_experts, max(roles.FEW, 1)
    p_rows, p_words, p_timeout = block.index("row_of"), block.index("words"), block.index("timeout_ns")

    @device_fn
    def allocate():
        return (shared_array(n_by_warp, int32), shared_array(n_by_group, int32), shared_array(n_columns, int32),
                shared_array(n_few, int32))

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
    def tell_ranks(params, epoch, by_warp):
        """A warp a rank: tells the other blocks."""
        lane, rank = i32(lane_id()), i32(warp_id())
        while rank < ranks:
            up_to = add_warps(by_warp, rank, lane)
            if lane == 31:
                tell(params, epoch, i32(block_idx()), rank, up_to)
            rank = i32(rank + n_warps())

    @device_fn
    def blocks_before():
        """Of the blocks that send those before this one; all, for the leader block."""
        return i32(min(i32(block_idx()), sending()))

    @device_fn
    def sum_ranks(params, epoch, totals):
        """A warp a rank, a lane some of the blocks."""
        lane, rank, ok, end = i32(lane_id()), i32(warp_id()), True, blocks_before()
        while rank < ranks:
            told, here = sum_up(params, epoch, rank, lane, i32(32), end)
            ok, total = ok and told, i32(warp_sum_i32(here))
            if lane == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())
        return ok

    @device_fn
    def add_experts(params, epoch, sums, at, end):
        """A thread an expert and some of the blocks: adds to sums[at + expert], which is 0 at first."""
        ok, i = True, i32(thread_idx())
        while i < n_by_group:
            expert = i32(u32(i) % u32(n_experts))
            told, here = sum_up(params, epoch, i32(ranks + expert), i32(u32(i) // u32(n_experts)), i32(groups), end)
            if here != 0:
                shared_add_i32(sums, i32(at + expert), here)
            ok, i = ok and told, i32(i + block_dim())
        return not syncthreads_or(not ok)

    @device_fn
    def number_few(rows, num_tokens, masks, totals):
        """Totals out of the masks of all tokens, a warp a rank, and the numbers of the block's own tokens."""
        lane, rank = i32(lane_id()), i32(warp_id())
        mine, end = tokens_of_block(num_tokens)
        while rank < ranks:
            total, first = i32(0), i32(0)
            while first < num_tokens:
                token, bit, row = i32(first + lane), u32(0), i32(-1)
                if token < num_tokens:
                    bit = u32(u32(u32(masks[token]) >> u32(rank)) & u32(1))
                go = u32(ballot(bit != u32(0)))
                if bit != u32(0):
                    row = i32(total + popc(u32(go & u32(u32(u32(1) << u32(lane)) - u32(1)))))
                if token >= mine and token < end:
                    store_i32(rows + u64(4) * u64(token * ranks + rank), row)
                total, first = i32(total + popc(go)), i32(first + 32)
            if lane == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())

    @device_fn
    def look_at_few(ids, begun, num_tokens, scratch):
        _, _, _, masks = scratch
        token = i32(thread_idx())
        while token < num_tokens:
            masks[token] = i32(mask_of_token(ids, token))
            token = i32(token + block_dim())
        return goes_on(begun)                   # and the masks of all threads

    @device_fn
    def count_few(params, num_tokens, scratch):
        _, _, totals, masks = scratch
        number_few(params[p_rows], num_tokens, masks, totals)
        syncthreads()

    @device_fn
    def count_many(params, ids, begun, num_tokens, by_warp, experts, totals):
        first, end = tokens_of_block(num_tokens)
        clear(totals, n_columns)
        if expert_major:
            fetch_map(ids, first, end)
            count_map(ids, first, end, experts)
        else:
            clear(experts, n_experts)           # number() counts them
        count_ranks(ids, first, end, by_warp)
        epoch = goes_on(begun)                  # and the counts of all warps
        if epoch == u64(0):
            return epoch
        if block_idx() < sending():
            tell_ranks(params, epoch, by_warp)
            if expert_major:
                expert = i32(thread_idx())
                while expert < n_experts:
                    tell(params, epoch, i32(block_idx()), i32(ranks + expert), add_groups(experts, expert))
                    expert = i32(expert + block_dim())
        if syncthreads_or(not sum_ranks(params, epoch, totals)):
            epoch = u64(0)
        return epoch

    @device_fn
    def count(params, ids, begun, num_tokens, scratch):
        by_warp, experts, totals, _ = scratch
        if expert_major:
            return count_many(params, ids, begun, num_tokens, by_warp, experts, totals)
        if are_few(num_tokens):
            epoch = look_at_few(ids, begun, num_tokens, scratch)
            if epoch != u64(0):
                count_few(params, num_tokens, scratch)
            return epoch
        return count_many(params, ids, begun, num_tokens, by_warp, experts, totals)

    @device_fn
    def numbered_at(params, epoch):
        words = params[p_words]
        return u64(words + u64(control.NUMBERED) + u64(4) * (u64(epoch) & u64(1)))

    @device_fn
    def say_numbered(params, epoch, num_tokens):
        if are_shared(num_tokens):              # behind a barrier
            if thread_idx() == block_dim() - 1:     # the first threads wait for notes
                red_add_release_gpu_i32(numbered_at(params, epoch), i32(1))

    @device_fn
    def tell_experts(params, epoch, experts):
        expert = i32(thread_idx())
        while expert < n_experts:
            tell(params, epoch, i32(block_idx()), i32(ranks + expert), i32(experts[expert]))
            expert = i32(expert + block_dim())

    @device_fn
    def number(params, ids, epoch, num_tokens, scratch):
        by_warp, experts, totals, _ = scratch
        if are_few(num_tokens):                 # it is done
            say_numbered(params, epoch, num_tokens)
            return True
        first, end = tokens_of_block(num_tokens)
        number_ranks(params, ids, first, end, by_warp, totals)
        if expert_major:
            if not add_experts(params, epoch, totals, i32(ranks), blocks_before()):
                return False
            number_map(params, first, end, experts, totals, ranks)
        else:
            count_experts(params, ids, first, end, experts)
        syncthreads()                           # the numbers and counts of all warps
        say_numbered(params, epoch, num_tokens)
        if not expert_major:
            tell_experts(params, epoch, experts)
        return True

    @device_fn
    def await_numbers(params, epoch, lane):
        ok = True
        if lane == 0:
            words = params[p_words]
            ok = wait_for_own_blocks(numbered_at(params, epoch), sending(), words + u64(control.STATUS),
                                     params[p_timeout], phase, FOR_BLOCKS, i32(0))
        failed = any_lane(not ok)
        syncwarp()                              # what lane 0 acquired, all lanes read
        return failed == 0

    @device_fn
    def sum_experts(params, ids, epoch, num_tokens, scratch):
        _, experts, totals, _ = scratch
        if expert_major:
            return add_experts(params, epoch, totals, i32(ranks), sending())
        if are_few(num_tokens):
            clear(experts, n_experts)
            syncthreads()                       # zeros before sums
            count_experts(params, ids, i32(0), i32(num_tokens), experts)
            syncthreads()
            return True
        return add_experts(params, epoch, experts, i32(0), sending())

    return Layout(allocate, count, look_at_few, count_few, number, await_numbers, sum_experts)
