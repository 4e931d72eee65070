"""Combine of rows: each rank pushes its rows back to the ranks of their tokens, which sum them by token.

1. The notify warp announces the array in which peers write the rows that return to this rank, ordered by peer, then by
   token. Unless expert-major, a rank's own rows stay in x, and their places in the array stay empty. Every block loads
   the counts of rows and tokens from the handle.
2. If no rank has more than shape.lamport tokens, small/combine.py does the rest. Otherwise every block waits for the
   announcements of all ranks.
3. Push (push.py): some of the blocks, or all, send parts of rows and raise a flag for each. In expert-major, a row is
   the sum over the local experts, rounded once. Probs go with part 0.
4. Reduce (reduce.py): the other blocks meanwhile, and each warp that finds no row left to push. A part of an output row
   is summed when that part of its rows has arrived, over ascending ranks in float32, and rounded; with several p2p
   worlds each world's sum is rounded, then their sum.
5. The leader block has reduced like the others. It ends the call when all of its rank's blocks have begun it (all ranks
   have, by step 2). Other blocks may still reduce: results are complete when the launch has ended.
"""

from functools import lru_cache

from epmoe.device import block_idx, device_fn, grid_dim, i32, int32, kernel, shared_array, syncthreads_or, u32, u64

from .. import stamps
from ..params import CACHED
from . import announce, copy, mailbox, push, reduce, wait
from . import call as calls
from .small import combine as small_batch
from .shape import BLOCK


def n_pushing(shape):
    """Device function () -> how many blocks push, at times all; the others reduce from the start."""
    tuning = shape.tuning
    tenths, many_blocks, tenths_of_few = tuning.push_tenths, tuning.many_blocks, tuning.push_tenths
    if shape.expert_major:                      # whose pushing blocks also sum
        tenths_of_few = tuning.push_tenths_of_sums
    elif push.n_dst_ranks_of(shape) <= 1:
        tenths_of_few = tuning.push_tenths_of_two

    @device_fn
    def blocks():
        n = i32(tenths_of_few) if grid_dim() < many_blocks else i32(tenths)
        return i32(max(1, i32(u32(i32(grid_dim() * n)) // u32(10))))

    return blocks


@lru_cache(CACHED)
def combine_kernel(shape):
    """Makes the kernel. All blocks of all ranks must be resident; at least two a rank, as one may only lead."""
    mark, (_, end_call) = stamps.make(shape.trace, BLOCK), calls.begin_and_end(shape.n_ranks)
    begin = announce.beginning(shape, mark, small_batch.combining(shape, mark) if shape.lamport else None)
    await_announcements = announce.awaiting(shape, wait.ROWS_COMBINE, "without_counts")
    flags, n_announced = copy.flags(shape, wait.ROWS_COMBINE), mailbox.numbers_announced(shape.n_ranks)
    pushing_blocks, push_rows, reduce_rows = n_pushing(shape), push.make(shape, flags), reduce.make(shape, flags)

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_combine(params, num_tokens, my_rank):
        announced = shared_array(n_announced, int32)
        call, goes_on = begin(calls.Call(params, num_tokens, my_rank, u64(calls.OVER)), announced)
        if not goes_on:
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
