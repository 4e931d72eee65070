"""Combine of rows: each rank pushes its rows back to the ranks of their tokens, which sum them by token.

1. The notify warp announces where peers write the rows that return to this rank: by peer, then by token. Unless
   expert-major, a rank's own rows stay where they are. Every block loads the counts of rows from the handle.
2. If the batches of all ranks are small, small/combine.py. Otherwise every block waits for the announcements of all.
3. Push (push.py): some of the blocks, or all, send parts of rows and raise a flag for each. In expert-major, a row is
   the sum over the local experts, rounded once.
4. Reduce (reduce.py): the other blocks meanwhile, and each warp that finds no row left to push. A part of a token is
   summed when its rows have arrived, over ascending ranks in float32 (first by p2p world), and rounded.
5. The leader block has reduced like the others. It ends the call when all of its rank's blocks have begun it.
"""

from functools import lru_cache

from epmoe.device import (block_idx, device_fn, grid_dim, i32, int32, kernel, shared_array, syncthreads_or, u32, u64,
                          uint64)

from .. import stamps
from ..params import CACHED
from . import announce, copy, mailbox, push, reduce, wait
from . import call as calls
from .small import combine as small_batch
from .shape import BLOCK


def pushing(shape):
    """Device function () -> how many blocks push, at times all; the others reduce from the start."""
    tuning = shape.tuning
    tenths, many_blocks, tenths_of_few = tuning.push_tenths, tuning.many_blocks, tuning.push_tenths
    if shape.expert_major:                      # whose pushing blocks also sum
        tenths_of_few = tuning.push_tenths_of_sums
    elif push.n_targets_of(shape) <= 1:
        tenths_of_few = tuning.push_tenths_of_two

    @device_fn
    def blocks():
        n = i32(tenths_of_few) if grid_dim() < many_blocks else i32(tenths)
        return i32(max(1, i32(u32(i32(grid_dim() * n)) // u32(10))))

    return blocks


@lru_cache(CACHED)
def combine_kernel(shape):
    """Makes the kernel. Its grid needs at least two blocks; all must be resident, on all ranks together."""
    mark, (_, end_call) = stamps.make(shape.trace, BLOCK), calls.begin_and_end(shape.n_ranks)
    small = small_batch.combining(shape, mark) if shape.lamport else None
    begin, has_small = announce.beginning(shape, mark, small), bool(shape.lamport)
    await_announcements = announce.awaiting(shape, wait.ROWS_COMBINE, "without_counts")
    flags, n_announced = copy.flags(shape, wait.ROWS_COMBINE), mailbox.numbers_announced(shape.n_ranks)
    pushing_blocks, push_rows, reduce_rows = pushing(shape), push.make(shape, flags), reduce.make(shape, flags)

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_combine(params, num_tokens, my_rank):
        announced, shared_epoch = shared_array(n_announced, int32), shared_array(1, uint64)
        call, prepared = begin(calls.Call(params, num_tokens, my_rank, u64(calls.OVER)), announced, shared_epoch)
        if calls.is_over(call):
            return
        if has_small and small.fits(announced):
            small.rest(call, announced, prepared)
            return
        calls.signal_begun(call)
        if not await_announcements(call, announced):
            return
        mark(params, stamps.COUNTED)
        if block_idx() < pushing_blocks():
            push_rows(call, announced)
            mark(params, stamps.SENT)
        if syncthreads_or(not reduce_rows(call, announced)):
            return
        mark(params, stamps.REDUCED)
        if calls.is_leader() and calls.leader_awaits_begun(call, wait.ROWS_COMBINE):
            end_call(call)
            mark(params, stamps.LEFT)

    return rows_combine
