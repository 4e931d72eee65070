"""Dispatch of rows: every token travels once to each rank of its experts, straight to the row where it stays.

1. layout (layout.py): which rank gets which token, and the token's number among this rank's; deterministic.
2. exchange (exchange.py): each rank tells all others its counts and where its arrays for this call lie. This and what
follows from it for the handle (records.py) is done by one block, the clerk, which sends nothing.
3. sending (senders.py): row, ids and probs, at the place that counts and layout give.
4. arrival (exchange.py): every block tells every rank when it has sent its part; the clerk waits for all of them.
Where rows are expanded by expert in the same launch, some blocks send, and raise a flag for each part of a row, while
the others expand what has come (expanders.py); then all do.

resend is 2 (without counts), 3 and 4 with the layout of a handle: a cached dispatch, or the second try of a dispatch
that found no room.
"""

from functools import lru_cache

from epmoe.device import (block_dim, block_idx, device_fn, i32, int32, kernel, shared_array, syncthreads, syncthreads_or,
                          thread_idx)

from .. import stamps
from . import exchange, expanders, layout, records, roles, routing, row_flags, senders, waits
from .block import parameter_block
from .row_copy import VECTOR
from .status import ROWS_DISPATCH

CACHED = 128


def _tell_experts(shape, block, announce_experts):
    """Device function tell_experts(params, epoch, num_tokens, my_rank, totals): of the clerk, tokens of each expert."""
    ranks, n_experts, expert_major = shape.n_ranks, shape.n_experts, shape.expert_major
    count_ids = routing.count_ids(shape, block)

    if expert_major:
        @device_fn
        def tell_columns(params, epoch, num_tokens, my_rank, totals):
            announce_experts(params, epoch, my_rank, totals, ranks)

        return tell_columns

    @device_fn
    def tell_ids(params, epoch, num_tokens, my_rank, totals):
        counts, i = shared_array(n_experts, int32), i32(thread_idx())
        while i < n_experts:
            counts[i] = i32(0)
            i = i32(i + block_dim())
        syncthreads()                           # zeros before sums
        count_ids(params, num_tokens, counts)
        syncthreads()                           # sums of all warps
        announce_experts(params, epoch, my_rank, counts, 0)

    return tell_ids


@lru_cache(CACHED)
def dispatch_kernel(shape):
    """The kernel; its grid's blocks, at least two, must all be resident, on all ranks together."""
    block = parameter_block(shape.n_ranks)
    begin, goes_on, end = waits.of_block(block, shape.n_ranks)
    count, number = layout.make(shape, block, ROWS_DISPATCH, goes_on)
    meeting = exchange.make(shape, block, ROWS_DISPATCH, with_counts=True)
    announce, announce_experts, await_notes, expert_count, sent, await_arrivals = meeting
    record, tell_experts = records.make(shape, block, expert_count), _tell_experts(shape, block, announce_experts)
    send, recorded, expand_rows = _moving(shape, block)
    sending, has_room, mark = roles.sending(shape), senders.room(shape), stamps.make(block, shape.trace)
    n_columns, n_by_warp, expands = shape.n_columns, layout.by_warp_numbers(shape), shape.expands
    n_notes = exchange.words_of_notes(shape.n_ranks)

    @kernel(max_threads=shape.threads)
    def rows_dispatch(params, num_tokens, my_rank):
        by_warp, notes = shared_array(n_by_warp, int32), shared_array(n_notes, int32)
        before, totals = shared_array(n_columns, int32), shared_array(n_columns, int32)
        mark(params, stamps.START)
        epoch, sends, is_clerk = begin(params), block_idx() < sending(), roles.is_clerk()
        if sends or is_clerk:
            if not count(params, epoch, num_tokens, by_warp, before, totals):
                return
        elif not goes_on(params):
            return
        mark(params, stamps.CLAIMED)
        if is_clerk:
            announce(params, epoch, num_tokens, my_rank, totals)
            mark(params, stamps.ANNOUNCED)
            tell_experts(params, epoch, num_tokens, my_rank, totals)
        if sends:
            number(params, num_tokens, by_warp, before)
        if not await_notes(params, epoch, my_rank, notes):
            return
        mark(params, stamps.COUNTED)
        ok = True
        if sends:
            send(params, epoch, num_tokens, my_rank, notes)
            mark(params, stamps.SENT)
        if is_clerk:
            ok = record(params, epoch, my_rank, notes, has_room(notes))
            mark(params, stamps.PLACED)
        if expands:
            if ok and is_clerk:
                recorded(params, epoch)
            if ok and has_room(notes):
                ok = expand_rows(params, epoch, my_rank, notes)
            ok = not syncthreads_or(not ok)
            mark(params, stamps.COPIED)
        elif sends:
            sent(params, epoch, my_rank)
        elif ok:
            ok = await_arrivals(params, epoch, my_rank, notes)
            mark(params, stamps.ARRIVED)
        if ok and is_clerk:
            end(params, epoch, my_rank, ROWS_DISPATCH)
        mark(params, stamps.LEFT)

    return rows_dispatch


@lru_cache(CACHED)
def resend_kernel(shape):
    """The kernel of a dispatch whose layout is known."""
    block = parameter_block(shape.n_ranks)
    begin, goes_on, end = waits.of_block(block, shape.n_ranks)
    meeting = exchange.make(shape, block, ROWS_DISPATCH, with_counts=False)
    announce, _, await_notes, _, sent, await_arrivals = meeting
    send, _, expand_rows = _moving(shape, block)
    sending, mark, expands = roles.sending(shape), stamps.make(block, shape.trace), shape.expands
    n_notes = exchange.words_of_notes(shape.n_ranks)

    @kernel(max_threads=shape.threads)
    def rows_resend(params, num_tokens, my_rank):
        notes = shared_array(n_notes, int32)
        mark(params, stamps.START)
        epoch, sends, is_clerk, ok = begin(params), block_idx() < sending(), roles.is_clerk(), True
        if not goes_on(params):
            return
        if is_clerk:
            announce(params, epoch, num_tokens, my_rank, notes)
            mark(params, stamps.ANNOUNCED)
        if not await_notes(params, epoch, my_rank, notes):
            return
        mark(params, stamps.COUNTED)
        if sends:
            send(params, epoch, num_tokens, my_rank, notes)
            mark(params, stamps.SENT)
        if expands:
            ok = not syncthreads_or(not expand_rows(params, epoch, my_rank, notes))
            mark(params, stamps.COPIED)
        elif sends:
            sent(params, epoch, my_rank)
        else:
            ok = await_arrivals(params, epoch, my_rank, notes)
            mark(params, stamps.ARRIVED)
        if ok and is_clerk:
            end(params, epoch, my_rank, ROWS_DISPATCH)
        mark(params, stamps.LEFT)

    return rows_resend


def _moving(shape, block):
    """Device functions (send, recorded, expand_rows); the last two None where nothing is expanded."""
    if not shape.expands:
        return senders.make(shape, block), None, None
    n_vectors = 1 if shape.encode else shape.row_bytes // VECTOR   # a row that is encoded travels whole
    flags = row_flags.make(shape, block, ROWS_DISPATCH, n_vectors)
    return senders.make(shape, block, flags), *expanders.make(shape, block, flags)
