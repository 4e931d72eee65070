"""Combine of rows: each rank pushes its rows back to the ranks their tokens came from, which sum them by token.

1. exchange: each rank tells where the rows that it gets back are to lie (one place for each (token, rank): no two
meet). 2. pushing (pushers.py): row by row; expert-major, a row is the sum over the local experts, rounded once. 3.
arrival: a signal to every rank; every block waits for everybody's. 4. reducing (reducers.py): sum over ranks ascending
in float32, rounded once.
"""

from functools import lru_cache

from epmoe.device import block_idx, kernel

from . import exchange, pushers, reducers, waits
from .block import parameter_block
from .status import ROWS_COMBINE

CACHED = 128


@lru_cache(CACHED)
def combine_kernel(shape):
    """The kernel; its grid's blocks must all be resident, on all ranks together."""
    block = parameter_block(shape.n_ranks)
    failed, begin, _ = waits.of_block(block)
    meeting = exchange.make(shape, block, ROWS_COMBINE, with_counts=False)
    announce, await_notes, note_of, finish, await_arrivals = meeting
    push, reduce = pushers.make(shape, block, note_of), reducers.make(shape, block, note_of)

    @kernel(max_threads=shape.threads)
    def rows_combine(params, num_tokens, my_rank):
        if failed(params):
            return
        epoch = begin(params)
        if block_idx() == 0:
            announce(params, epoch, num_tokens, my_rank)
        if not await_notes(params, epoch, my_rank):
            return
        push(params, epoch, my_rank)
        finish(params, epoch, my_rank)
        if not await_arrivals(params, epoch, my_rank):
            return
        reduce(params, epoch, num_tokens, my_rank)

    return rows_combine
