"""Dispatch of rows: every token travels once to each rank of its experts, straight to the row where it stays.

1. layout (layout.py): which rank gets which token, and the token's number among this rank's; deterministic.
2. exchange (exchange.py): each rank tells all others its counts and where its arrays for this call lie.
3. records (records.py): one block writes down counts for the handle and the host, while the others send.
4. sending (senders.py): row, ids and probs, at the place that counts and layout give.
5. arrival (exchange.py): a signal to every rank; the last block waits for everybody's.

resend is 2 (without counts), 4 and 5 with the layout of a handle: a cached dispatch, or the second try of a dispatch
that found no room.
"""

from functools import lru_cache

from epmoe.device import block_idx, i32, kernel, load_u64, u64

from . import control, exchange, layout, records, senders, waits
from .block import parameter_block
from .status import ROWS_DISPATCH

CACHED = 128


@lru_cache(CACHED)
def dispatch_kernel(shape):
    """The kernel; its grid's blocks must all be resident, on all ranks together."""
    block = parameter_block(shape.n_ranks)
    failed, begin, _ = waits.of_block(block)
    place_tokens = layout.make(shape, block, ROWS_DISPATCH)
    meeting = exchange.make(shape, block, ROWS_DISPATCH, with_counts=True)
    announce, await_notes, note_of, finish, await_arrivals = meeting
    record, send = records.make(shape, block, note_of), senders.make(shape, block, note_of)
    p_note_bytes = block.offset("note_bytes")

    @kernel(max_threads=shape.threads)
    def rows_dispatch(params, num_tokens, my_rank):
        if failed(params):
            return
        epoch = begin(params)
        if not place_tokens(params, num_tokens, my_rank):
            return
        if block_idx() == 0:
            announce(params, epoch, num_tokens, my_rank)
        if not await_notes(params, epoch, my_rank):
            return
        book = u64(note_of(params, epoch, my_rank, i32(0)) + u64(control.COUNTS))
        has_room = send(params, epoch, num_tokens, my_rank, book, u64(load_u64(params + u64(p_note_bytes))))
        if block_idx() == 0:
            record(params, epoch, my_rank, has_room)
        if finish(params, epoch, my_rank):
            await_arrivals(params, epoch, my_rank)

    return rows_dispatch


@lru_cache(CACHED)
def resend_kernel(shape):
    """The kernel of a dispatch whose layout is known."""
    block = parameter_block(shape.n_ranks)
    failed, begin, _ = waits.of_block(block)
    meeting = exchange.make(shape, block, ROWS_DISPATCH, with_counts=False)
    announce, await_notes, note_of, finish, await_arrivals = meeting
    send = senders.make(shape, block, note_of)
    p_counts, stride = block.offset("counts"), 4 * shape.n_ranks

    @kernel(max_threads=shape.threads)
    def rows_resend(params, num_tokens, my_rank):
        if failed(params):
            return
        epoch = begin(params)
        if block_idx() == 0:
            announce(params, epoch, num_tokens, my_rank)
        if not await_notes(params, epoch, my_rank):
            return
        send(params, epoch, num_tokens, my_rank, u64(load_u64(params + u64(p_counts))), u64(stride))
        if finish(params, epoch, my_rank):
            await_arrivals(params, epoch, my_rank)

    return rows_resend
