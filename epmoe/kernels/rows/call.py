"""A call: its record, its beginning and end, and the part of each block.

The last block, the leader block, talks to the peers. In dispatches and small batches it sends no rows; of the other
blocks, all or some send. In other combines it reduces, and pushes if all blocks do. Its notify warp announces this
rank. When a small batch is dispatched without a handle, its fence warp announces the places, which need a fence.
"""

from functools import cache
from typing import NamedTuple

from epmoe.device import (atomic_add_relaxed_gpu_i32, block_dim, block_idx, device_fn, grid_dim, i32, load_u64, n_warps,
                          prefetch, red_add_release_gpu_i32, store_i32, store_u64, syncthreads_or, thread_idx, u64,
                          warp_broadcast_i32, warp_id)

from ..prefetch import LINE
from ..status import has_failed
from . import mailbox, wait
from .shape import memory_of, p, parameter_block

OVER = 0                # instead of a call's number: it has not begun, this block is done, or a wait has expired


class Call(NamedTuple):
    """The arguments of a kernel and the number of the call, for the steps of the kernel.

    epoch: the call's number; OVER also before the call has begun.
    """

    params: tuple
    num_tokens: int
    my_rank: int
    epoch: int


@device_fn
def at_epoch(call, epoch):
    """The same call with this number."""
    return Call(call.params, call.num_tokens, call.my_rank, u64(epoch))


@device_fn
def is_over(call):
    """Whether this block has nothing left to do in the call."""
    return call.epoch == u64(OVER)


@device_fn
def is_leader():
    """Whether this is the leader block."""
    return block_idx() == grid_dim() - 1


@device_fn
def is_notify_warp():
    """Whether this is the leader block's last warp. In a small dispatch the block's other warps read tokens."""
    return is_leader() and warp_id() == n_warps() - 1


@device_fn
def is_fence_warp():
    """Whether this is the leader block's last warp but one, or its only warp."""
    return is_leader() and warp_id() == max(0, i32(n_warps() - 2))


@device_fn
def is_last_thread():
    """Whether this is the block's last thread. While the first threads wait for announcements, it has time."""
    return thread_idx() == block_dim() - 1


@device_fn
def num_senders():
    """The number of blocks but the leader block. In dispatches they send; in small ones, some of them."""
    return i32(grid_dim() - 1)


@device_fn
def read_epoch(call):
    """The call with its number, or OVER, as of share_epoch; for a warp that does not wait for other warps."""
    words = call.params[p.words]
    epoch = u64(u64(load_u64(words + u64(mailbox.EPOCH))) + u64(1))
    return at_epoch(call, u64(OVER) if has_failed(words + u64(mailbox.STATUS)) else epoch)


@device_fn
def share_epoch(call, at_entry):
    """The call with its number, after the block's first barrier; OVER if any wait of this rank has expired."""
    failed, last_epoch, shared_epoch = at_entry
    if thread_idx() == 0:
        shared_epoch[0] = u64(last_epoch + u64(1))
    if syncthreads_or(failed):
        return at_epoch(call, u64(OVER))
    return at_epoch(call, u64(shared_epoch[0]))


@device_fn
def signal_begun(call):
    """The block's last thread adds this block to BEGUN: a release, after what this thread has stored."""
    if is_last_thread():
        red_add_release_gpu_i32(call.params[p.words] + u64(mailbox.BEGUN), i32(1))


@device_fn
def await_begun(call, phase):
    """One thread of the leader block waits until all blocks of this rank have begun, and acquires. Returns success."""
    return wait.for_blocks(call.params, call.params[p.words] + u64(mailbox.BEGUN), i32(grid_dim()), phase)


@device_fn
def leader_awaits_begun(call, phase):
    """The whole leader block waits until all blocks of this rank have begun. Returns success."""
    ok = thread_idx() != 0 or await_begun(call, phase)
    return not syncthreads_or(not ok)           # thread 0 acquired for all


def claims(counter):
    """Device function claim(call, lane): a warp claims the next unit of work that no warp of this rank has.

    counter: NEXT_TO_RECEIVE or NEXT_TO_SEND.
    """
    @device_fn
    def claim(call, lane):
        unit = i32(0)
        if lane == 0:
            at = call.params[p.words] + u64(counter) + u64(4) * (u64(call.epoch) & u64(1))
            unit = atomic_add_relaxed_gpu_i32(at, i32(1))
        return i32(warp_broadcast_i32(unit, i32(0)))

    return claim


@cache
def begin_and_end(n_ranks):
    """(begin, end): device functions for the beginning and the end of a call.

    begin(params, shared_epoch) -> at_entry, the argument of share_epoch: (whether a wait has expired, number of the
    last call, shared_epoch). The first two are only valid in thread 0. shared_epoch: shared uint64 array [1].
    end(call): the leader block calls it when all have begun; nobody uses the words that it clears (mailbox.py).
    """
    n_lines, memory = -(-8 * parameter_block(n_ranks).context_words // LINE), memory_of(n_ranks)

    @device_fn
    def begin(params, shared_epoch):
        if thread_idx() < n_lines:              # their misses overlap
            prefetch(params[p.context] + u64(LINE) * u64(thread_idx()))
        failed, last_epoch = False, u64(0)
        if thread_idx() == 0:                   # others need not wait for it until the barrier
            failed = has_failed(params[p.words] + u64(mailbox.STATUS))
            last_epoch = u64(load_u64(params[p.words] + u64(mailbox.EPOCH)))
        return failed, last_epoch, shared_epoch

    @device_fn
    def end(call):
        words, i = call.params[p.words], i32(thread_idx())
        other = u64(u64(u64(call.epoch) & u64(1)) ^ u64(1))
        if i < n_ranks:                         # arrivals, which lie at the beginning of control memory
            mine = memory.control(call.params, call.my_rank)
            store_i32(mine + u64(4) * (other * u64(n_ranks) + u64(i)), i32(0))
        if i == 0:
            store_i32(words + u64(mailbox.NEXT_TO_RECEIVE) + u64(4) * other, i32(0))
            store_i32(words + u64(mailbox.NEXT_TO_SEND) + u64(4) * other, i32(0))
            store_i32(words + u64(mailbox.NUMBERED) + u64(4) * other, i32(0))
            store_i32(words + u64(mailbox.BEGUN), i32(0))
            store_u64(words + u64(mailbox.EPOCH), call.epoch)

    return begin, end
