"""Combine of rows: each rank pushes its rows back to the ranks of their tokens, which sum them by token.

1. exchange: each rank announces where its returned rows must be written. Each (token, rank) has its own place.
2. pushing (pushers.py): some of the blocks send row by row, with a flag for each part of a row. In expert-major, a row
   is the sum over the local experts, rounded once.
3. reducing (reducers.py): the other blocks meanwhile, and all blocks when nothing is left to push. Each part of a token
   is summed when its rows have arrived, over ranks ascending in float32, rounded once.

Small numbers of rows need not wait for the exchange: all blocks but the leader block push them into windows
(windows.py), and then reduce. Rows of up to 128 tokens need no flags (lamport_combine.py).
"""

from functools import lru_cache

from epmoe.device import (block_dim, block_idx, grid_dim, i32, int32, kernel, shared_array, syncthreads_or, thread_idx,
                          u32, u64, uint64)

from .. import stamps
from . import exchange, lamport_combine, peers, pushers, reducers, roles, row_flags, waits, windows
from .block import parameter_block
from .row_copy import VECTOR
from .status import ROWS_COMBINE

CACHED = 128
PUSHING = 0.6           # of the blocks
PUSHING_TO_ONE = 0.5    # of few blocks (pushers.py), if there is one peer: there is more to reduce
FEWEST_PARTS = 4        # of a row


@lru_cache(CACHED)
def combine_kernel(shape):
    """The kernel; its grid's blocks, at least two, must all be resident, on all ranks together."""
    block = parameter_block(shape.n_ranks)
    of_block = waits.of_block(block, shape.n_ranks)
    begin, epoch_now, goes_on, say_begun, _, all_begun, end = of_block
    few = windows.make(shape, block, ROWS_COMBINE)
    few_rows, lamport = few.all_few, shape.lamport > 0
    need_no_signals = peers.all_few(shape, shape.lamport, told=False)
    meeting = exchange.make(shape, block, ROWS_COMBINE, with_counts=False)
    load_counts, await_notes = meeting.load_counts, meeting.await_notes
    flags = row_flags.make(shape, block, ROWS_COMBINE, shape.row_bytes // VECTOR, FEWEST_PARTS)
    push, reduce = pushers.make(shape, block, flags, few), reducers.make(shape, block, flags, few)
    mark, mark_own = stamps.make(block, shape.trace), stamps.by_caller(block, shape.trace)
    herald = exchange.heralding(epoch_now, meeting.announce, mark_own)
    in_vectors = lamport_combine.make(shape, block, of_block, meeting, mark)
    n_notes, tenths, tenths_of_few = exchange.words_of_notes(shape.n_ranks), int(10 * PUSHING), int(10 * PUSHING)
    if pushers.n_targets_of(shape) <= 1:
        tenths_of_few = int(10 * PUSHING_TO_ONE)

    p_words, p_counts = block.index("words"), block.index("counts")

    @kernel(max_threads=shape.threads, words=block.n_words)
    def rows_combine(params, num_tokens, my_rank):
        words, counts = params[p_words], params[p_counts]
        notes, told = shared_array(n_notes, int32), shared_array(1, uint64)
        mark(params, stamps.START)
        begun = begin(params, words, told)
        if roles.is_herald():
            herald(params, words, num_tokens, my_rank, u64(0))
        load_counts(counts, notes)
        epoch = goes_on(begun)
        if epoch == u64(0):
            return
        if lamport and need_no_signals(notes):
            in_vectors(params, epoch, num_tokens, my_rank, notes)
            return
        are_few, pushing, ok = few_rows(notes), i32(grid_dim() - 1), True
        if thread_idx() == block_dim() - 1 and (roles.is_clerk() or not are_few):
            say_begun(params)                   # others of few rows with their flags
        if not are_few:
            n = i32(tenths)
            if grid_dim() < pushers.MANY:
                n = i32(tenths_of_few)
            pushing = i32(max(1, i32(u32(i32(grid_dim() * n)) // u32(10))))
            if not await_notes(params, epoch, my_rank, notes):
                return
            mark(params, stamps.COUNTED)
        if block_idx() < pushing:
            push(params, epoch, my_rank, notes, are_few)
            mark(params, stamps.SENT)
        if are_few and roles.is_clerk():        # it has its hands full, and ends the call for the others
            ok = await_notes(params, epoch, my_rank, notes)
        else:
            ok = reduce(params, epoch, num_tokens, my_rank, notes, are_few)
        if syncthreads_or(not ok):
            return
        mark(params, stamps.REDUCED)
        if roles.is_clerk():
            if all_begun(params, ROWS_COMBINE):
                end(params, epoch, my_rank)
                mark(params, stamps.LEFT)

    return rows_combine
