"""Dispatch of rows: every token is sent once to each rank of its experts, directly to its final row.

1. layout (layout.py): the tokens for each rank, and a token's number among this rank's; deterministic.
2. exchange (exchange.py): each rank tells all others its counts and the addresses of its arrays for this call. One
   block, the leader block, does this and writes the records for the handle (records.py). It sends no rows.
3. sending (senders.py): row, ids and probs, to the place that counts and layout give.
4. arrival (exchange.py): every block tells every rank when it has sent its part; the leader block waits for all of
   them.

If rows are expanded by expert in the same launch, some blocks send, and raise a flag for each part of a row. The others
expand the rows that have arrived (expanders.py). When sending is done, all blocks expand.

resend is 2 (without counts), 3 and 4 with the layout of a handle: a cached dispatch, or the second try of a dispatch
that found no room. Rows of up to 128 tokens are sent before 2, and need no 4 (lamport_dispatch.py). For expert-major,
expert_dispatch.py is faster for them.
"""

from functools import lru_cache

from epmoe.device import (block_dim, block_idx, fence_acq_rel_sys, i32, int32, kernel, lane_id, shared_array,
                          syncthreads, syncthreads_or, thread_idx, u64, uint64)

from .. import stamps
from . import (exchange, expanders, expert_dispatch, lamport_dispatch, layout, numbering, peers, records, roles,
               row_flags, senders, waits)
from .block import parameter_block
from .row_copy import VECTOR
from .status import ROWS_DISPATCH

CACHED = 128
FEWEST_PARTS = 4        # of a row that is expanded while others come
FEWEST_ENCODED = 4      # of one that is encoded


@lru_cache(CACHED)
def dispatch_kernel(shape):
    """The kernel; its grid's blocks, at least two, must all be resident, on all ranks together."""
    block = parameter_block(shape.n_ranks)
    of_block = waits.of_block(block, shape.n_ranks)
    begin, epoch_now, goes_on, say_begun, _, all_begun, end = of_block
    allocate, count, look_at_few, count_few, number, await_numbers, sum_experts = layout.make(
        shape, block, ROWS_DISPATCH, goes_on)
    mark_own = stamps.by_caller(block, shape.trace)
    meeting = exchange.make(shape, block, ROWS_DISPATCH, with_counts=True)
    (look, tell), announce_experts, await_notes = meeting.announce, meeting.announce_experts, meeting.await_notes
    sent, await_arrivals, await_facts = meeting.sent, meeting.await_arrivals, meeting.await_facts
    record, record_few = records.make(shape, block, meeting.expert_count)
    send, recorded, expand_rows = _moving(shape, block, await_numbers)
    sending, has_room, mark = roles.sending(shape), peers.room(shape.n_ranks), stamps.make(block, shape.trace)
    n_notes, expands, ranks = exchange.words_of_notes(shape.n_ranks), shape.expands, shape.n_ranks
    expert_major = shape.expert_major
    of_few, few = roles.few(shape), shape.few
    herald_places = exchange.heralding(epoch_now, meeting.announce_places, stamps.by_caller(block, False))
    herald_facts = exchange.heralding(epoch_now, meeting.announce_facts, mark_own, numbering.totals(shape))
    at_once = expert_dispatch.dispatching(shape, block, of_block, meeting, record_few, mark, mark_own)
    ahead, has_vectors = lamport_dispatch.ahead(shape, block), shape.lamport > 0
    in_vectors, unprepared_vectors, prepare_vectors = ahead.are_few, ahead.unprepared, ahead.prepare
    send_vectors, all_in_vectors, receive, erase = ahead.send, ahead.all_few, ahead.receive, ahead.erase
    nothing_known = ahead.nothing_known
    p_words, p_ids, p_x = (block.index(n) for n in ("words", "ids", "x"))

    @kernel(max_threads=shape.threads, words=block.n_words)
    def rows_dispatch(params, num_tokens, my_rank):
        words, ids, x = params[p_words], params[p_ids], params[p_x]
        notes, scratch, told = shared_array(n_notes, int32), allocate(), shared_array(1, uint64)
        mark(params, stamps.START)
        begun, sends, is_clerk = begin(params, words, told), block_idx() < sending(), roles.is_clerk()
        if few > 0 and num_tokens <= few:
            if at_once(params, num_tokens, my_rank, words, ids, x, begun, notes, scratch):
                return
        if roles.is_keeper() and of_few(num_tokens):
            herald_places(params, words, num_tokens, my_rank, u64(0))
        looked = (u64(0), u64(0), i32(0))
        if roles.is_herald():
            if of_few(num_tokens):
                herald_facts(params, words, num_tokens, my_rank, ids)
            else:
                fence_acq_rel_sys()             # earlier launches of this rank, before what it tells its peers
                looked = look(params, num_tokens, my_rank, i32(0))
        vectors, is_ahead = unprepared_vectors(), has_vectors and in_vectors(num_tokens)
        if is_ahead:
            vectors = prepare_vectors(params, num_tokens, my_rank, x)
            epoch = look_at_few(ids, begun, num_tokens, scratch)
        elif sends or is_clerk:
            epoch = count(params, ids, begun, num_tokens, scratch)
        else:
            epoch = goes_on(begun)
        if epoch == u64(0):
            return
        mark(params, stamps.CLAIMED)
        ok, known, are_in_vectors = True, nothing_known(), False
        if is_ahead:
            if thread_idx() == block_dim() - 1:
                say_begun(params)
            if not is_clerk:
                known = send_vectors(params, epoch, num_tokens, my_rank, x, scratch[3], vectors)
                mark(params, stamps.SENT)
            count_few(params, num_tokens, scratch)
        if is_clerk:
            if roles.is_herald() and not of_few(num_tokens):
                counts = i32(scratch[2][min(lane_id(), ranks - 1)])
                tell(params, epoch, num_tokens, my_rank, counts, looked)
                if lane_id() == 0:
                    mark_own(params, stamps.ANNOUNCED)
            ok = sum_experts(params, ids, epoch, num_tokens, scratch)
            if ok and expert_major:
                announce_experts(params, epoch, my_rank, scratch[2], ranks)
            elif ok:
                announce_experts(params, epoch, my_rank, scratch[1], 0)
        elif sends:
            if not number(params, ids, epoch, num_tokens, scratch):
                return
        if expands and thread_idx() == block_dim() - 1:
            say_begun(params)
        if is_ahead and not is_clerk:
            if not await_facts(params, epoch, my_rank, notes):      # places, which come later, are for the ordinary way
                return
            are_in_vectors = all_in_vectors(notes)
            if not are_in_vectors:
                erase(params, epoch, num_tokens, my_rank, known, vectors)
                syncthreads()                   # all warps have read the notes, which are written again
        if not are_in_vectors and not await_notes(params, epoch, my_rank, notes):
            return
        mark(params, stamps.COUNTED)
        if is_ahead and is_clerk:
            are_in_vectors = all_in_vectors(notes)
        if are_in_vectors and not is_clerk:
            receive(params, epoch, num_tokens, my_rank, x, known, notes, has_room(notes), vectors)
            mark(params, stamps.COPIED)
        elif sends:
            ok = send(params, epoch, num_tokens, my_rank, notes)
            mark(params, stamps.SENT)
        if is_clerk:
            ok = ok and record(params, epoch, my_rank, notes, has_room(notes), scratch[1])
            if expands or are_in_vectors:       # else arrivals of its own blocks say so
                ok = ok and all_begun(params, ROWS_DISPATCH)
            mark(params, stamps.PLACED)
        if expands:
            if ok and is_clerk:
                recorded(params, epoch)
            if ok and has_room(notes):
                ok = expand_rows(params, epoch, my_rank, notes)
            ok = not syncthreads_or(not ok)
            mark(params, stamps.COPIED)
        elif sends and not are_in_vectors:
            sent(params, epoch, my_rank, ok)
        elif ok and not are_in_vectors:
            ok = await_arrivals(params, epoch, my_rank, notes)
            mark(params, stamps.ARRIVED)
        if ok and is_clerk:
            end(params, epoch, my_rank)
        mark(params, stamps.LEFT)

    return rows_dispatch


@lru_cache(CACHED)
def resend_kernel(shape):
    """The kernel of a dispatch whose layout is known."""
    block = parameter_block(shape.n_ranks)
    of_block = waits.of_block(block, shape.n_ranks)
    begin, epoch_now, goes_on, say_begun, _, all_begun, end = of_block
    meeting = exchange.make(shape, block, ROWS_DISPATCH, with_counts=False)
    load_counts, await_notes = meeting.load_counts, meeting.await_notes
    sent, await_arrivals = meeting.sent, meeting.await_arrivals
    send, _, expand_rows = _moving(shape, block)
    sending, mark, expands = roles.sending(shape), stamps.make(block, shape.trace), shape.expands
    herald = exchange.heralding(epoch_now, meeting.announce, stamps.by_caller(block, shape.trace))
    n_notes = exchange.words_of_notes(shape.n_ranks)
    p_words, p_counts, p_rows, p_x = (block.index(n) for n in ("words", "counts", "row_of", "x"))
    prepare_vectors, goes_in_vectors, resend_in_vectors = lamport_dispatch.resending(shape, block, of_block, meeting,
                                                                                     mark)

    @kernel(max_threads=shape.threads, words=block.n_words)
    def rows_resend(params, num_tokens, my_rank):
        words, counts, row_of, x = params[p_words], params[p_counts], params[p_rows], params[p_x]
        notes, told = shared_array(n_notes, int32), shared_array(1, uint64)
        mark(params, stamps.START)
        begun, sends, is_clerk, ok = begin(params, words, told), block_idx() < sending(), roles.is_clerk(), True
        if roles.is_herald():
            herald(params, words, num_tokens, my_rank, u64(0))
        load_counts(counts, notes)
        in_vectors = prepare_vectors(params, num_tokens, my_rank, x)
        epoch = goes_on(begun)
        if epoch == u64(0):
            return
        if goes_in_vectors(notes):
            resend_in_vectors(params, epoch, num_tokens, my_rank, x, row_of, notes, in_vectors)
            return
        if expands and thread_idx() == block_dim() - 1:
            say_begun(params)
        if not await_notes(params, epoch, my_rank, notes):
            return
        mark(params, stamps.COUNTED)
        if expands:                             # else arrivals of its own blocks say so
            if is_clerk and not all_begun(params, ROWS_DISPATCH):
                return
        if sends:
            send(params, epoch, num_tokens, my_rank, notes)
            mark(params, stamps.SENT)
        if expands:
            ok = not syncthreads_or(not expand_rows(params, epoch, my_rank, notes))
            mark(params, stamps.COPIED)
        elif sends:
            sent(params, epoch, my_rank, True)
        else:
            ok = await_arrivals(params, epoch, my_rank, notes)
            mark(params, stamps.ARRIVED)
        if ok and is_clerk:
            end(params, epoch, my_rank)
        mark(params, stamps.LEFT)

    return rows_resend


def _moving(shape, block, await_numbers=None):
    """Device functions (send, recorded, expand_rows); the last two None where nothing is expanded."""
    if not shape.expands:
        return senders.make(shape, block, None, await_numbers), None, None
    n_vectors, fewest = senders.bytes_of(shape) // VECTOR, FEWEST_ENCODED if shape.encode else FEWEST_PARTS
    flags = row_flags.make(shape, block, ROWS_DISPATCH, n_vectors, fewest)
    return senders.make(shape, block, flags, await_numbers), *expanders.make(shape, block, flags)
