"""Dispatch of rows: every token is sent once to each rank of its experts.

The last block of a rank's launch (the leader block) announces this rank to the peers, mostly by its last warp (the
notify warp). The other blocks send. Expert-major also expands rows (copies them to the rows of their experts): in each
of these blocks a share of the warps sends (shape.sending.tenths). All other warps expand, and so do those that have
finished sending. If a batch has at most one token for each block, all warps of these blocks send first. Rows may be
encoded (bf16 to FP8) on the way.

1. Begin: read the last call's number, and whether a wait expired (call.py). This call's number (epoch) is one more.
2. Small batches (at most RowsShape.lamport tokens on every rank) are sent as Lamport rows, on a path of their own that
   ends the call (small/dispatch.py). Expert-major also expands them as they arrive (small/by_expert.py). If some rank
   has too many tokens for this path, or may lack room to receive, all ranks leave it. They do step 3 before they leave,
   and go on with step 4.
3. Number the rows (layout.py): the n-th of this rank's tokens that go to a rank is the n-th row that this rank sends
   there. The handle's row_of [T, R] has the numbers, -1 where a token does not go. Meanwhile the leader block announces
   this rank, and then how many tokens each expert gets (announce.py).
4. Wait (ld.acquire.sys) for the announcements of all ranks (`announced`), stored with st.relaxed.sys after a
   fence.acq_rel.sys. They tell where this rank's rows begin at each rank.
5. Send (send.py) each row to its final place. If some rank has no room to receive all its rows (capacity), nobody
   sends, and no row is lost: the hosts, which wait in such calls, make room and begin again. If there are more tokens
   than blocks that send, warps claim parts of all tokens. Before a warp reads the numbers of another block's token, it
   waits until all blocks have numbered theirs.
6. Meanwhile the leader block waits for the numbers of tokens by expert. It records for the handle the counts, where
   experts' rows begin, and whether they and their padding exceed num_rows (overflow). Rows beyond num_rows are lost. If
   the host waits for the counts, the leader block also stores them in host memory (handle.py).
7. Finish. A receiver learns in one of three ways that rows have arrived:
   Counters (by_counters): when a sending block has written its rows, if any, it passes a barrier and adds one to its
   rank's counter at every rank (red.release.sys). The leader block waits until each counter has reached the number of
   blocks that its rank has announced (ld.acquire.sys).
   Flags (by_flags), expert-major: senders raise a flag for each part of a row (st.release.sys). Warps that do not send,
   or have finished sending, wait until the leader block has recorded where experts' rows begin (st.release.gpu), and
   expand the parts that have arrived (ld.acquire.sys; expand.py). Rows of a rank to itself stay in the input unless
   they are encoded: only their metadata travels, with the flag of part 0.
   Lamport rows (step 2): each word is its own ready flag. A receiver polls a row's words until all have come.
8. The leader block ends the call when all its blocks have begun (step 7's counters show it, in expert-major those of
   signal_begun). In expert-major others may still expand: results are complete when the launch has ended.

Two more kernels. rows_resend is a cached dispatch: it takes numbers and counts from a handle. In step 3 it only
announces this rank, without counts; it has no step 6. rows_receive only expands. An expert-major dispatch whose host
waits has memory for about as many rows by expert as recent calls had (out_rows). If there are more, it expands none.
The host reads their number, makes room, and launches rows_receive on this rank alone.
"""

from functools import lru_cache

from epmoe.device import (SIM, device_fn, fence_acq_rel_sys, i32, int32, kernel, shared_array, syncthreads_or, u64,
                          uint64)

from .. import stamps
from ..params import CACHED
from . import announce, copy, expand, handle, layout, mailbox, send, wait
from . import call as calls
from .small import by_expert
from .small import dispatch as small_batch
from .shape import BLOCK


@lru_cache(CACHED)
def dispatch_kernel(shape):
    """Makes the kernel. Its grid needs at least two blocks; all must be resident, on all ranks together."""
    (begin_call, end_call), n_announced = calls.begin_and_end(shape.n_ranks), mailbox.numbers_announced(shape.n_ranks)
    mark = stamps.make(shape.trace, BLOCK)
    allocate, number_rows = layout.allocating(shape), numbering(shape, mark)
    most_tokens, has_small, expands = shape.lamport, bool(shape.lamport), shape.expert_major
    if has_small:
        dispatch_small = (by_expert.dispatching(shape, mark, number_rows) if shape.expert_major
                          else small_batch.dispatching(shape, mark))
    await_announcements = announce.awaiting(shape, wait.ROWS_DISPATCH, "header")
    send_rows, finish_rows = sending_and_finishing(shape, mark, layout.counter(shape, wait.ROWS_DISPATCH))
    record, has_room = handle.recording(shape, wait.ROWS_DISPATCH), mailbox.reading(shape.n_ranks).has_room

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_dispatch(params, num_tokens, my_rank):
        announced, scratch, shared_epoch = shared_array(n_announced, int32), allocate(), shared_array(1, uint64)
        mark(params, stamps.START)
        call = calls.Call(params, num_tokens, my_rank, u64(calls.OVER))
        at_entry = begin_call(params, shared_epoch)                      # 1
        # on a GPU larger batches have a kernel without the path for small ones; simulated ranks share one kernel
        if has_small and (not SIM or num_tokens <= most_tokens):
            epoch = dispatch_small(call, at_entry, announced, scratch)   # 2
        else:
            epoch = number_rows(call, at_entry, scratch)                 # 3
        if epoch == u64(calls.OVER):            # step 2 has ended the call, or a wait has expired
            return
        call, ok = calls.at_epoch(call, epoch), True
        if expands:                             # otherwise the arrival counters show it
            calls.signal_begun(call)
        if not await_announcements(call, announced):                     # 4
            return
        mark(params, stamps.COUNTED)
        if not calls.is_leader():
            ok = send_rows(call, announced)                              # 5
            mark(params, stamps.SENT)
        if calls.is_leader():                                            # 6
            ok = record(call, announced, has_room(announced), scratch.experts)
            ok = ok and (not expands or calls.leader_awaits_begun(call, wait.ROWS_DISPATCH))
            mark(params, stamps.PLACED)
        if finish_rows(call, announced, ok) and calls.is_leader():       # 7
            end_call(call)                                               # 8
        mark(params, stamps.LEFT)

    return rows_dispatch


def numbering(shape, mark):
    """Device function number_rows(call, at_entry, scratch) -> this call's number, or OVER if a wait has expired.

    When it returns, a block that sends has numbered its own tokens, and the leader block has announced this rank.
    """
    ranks, expert_major, numbers = shape.n_ranks, shape.expert_major, layout.make(shape, wait.ROWS_DISPATCH)
    announcement, announce_experts = announce.announcing(shape, "header"), announce.experts(shape)

    @device_fn
    def number_rows(call, at_entry, scratch):
        words = (u64(0), u64(0), i32(0), i32(0))
        if calls.is_notify_warp():
            fence_acq_rel_sys()                 # orders earlier launches of this rank before what it announces
            words = announcement.load(call, i32(0))
        call = calls.at_epoch(call, numbers.count_and_publish(call, at_entry, scratch))
        if calls.is_over(call):
            return u64(calls.OVER)
        mark(call.params, stamps.CLAIMED)
        if not calls.is_leader():
            ok = numbers.number(call, scratch)
        else:
            if calls.is_notify_warp():
                announcement.announce_totals(call, scratch.totals, words)
            ok = numbers.sum_experts(call, scratch)
            if ok and expert_major:
                announce_experts(call, scratch.totals, ranks)
            elif ok:
                announce_experts(call, scratch.experts, 0)
        return call.epoch if ok else u64(calls.OVER)

    return number_rows


def sending_and_finishing(shape, mark, numbered=None):
    """(send_rows, finish_rows). send_rows: see send.make. finish_rows(call, announced, ok) -> whether all is well.

    ok: whether this warp's waits have succeeded so far. By counters, senders signal and the leader block waits. By
    flags (expert-major), every block expands rows, if all ranks had room to receive. numbered: see send.make.
    """
    if not shape.expert_major:
        arrivals = announce.arrivals(shape, wait.ROWS_DISPATCH)

        @device_fn
        def by_counters(call, announced, ok):
            if not calls.is_leader():
                arrivals.sent(call, ok)
            elif ok:
                ok = arrivals.await_all(call, announced)
                mark(call.params, stamps.ARRIVED)
            return ok

        return send.make(shape, None, numbered), by_counters

    flags, has_room = copy.flags(shape, wait.ROWS_DISPATCH), mailbox.reading(shape.n_ranks).has_room
    expand_rows = expand.arriving(shape, flags, numbered)

    @device_fn
    def by_flags(call, announced, ok):
        if ok and has_room(announced):
            ok = expand_rows(call, announced)
        ok = not syncthreads_or(not ok)
        mark(call.params, stamps.COPIED)
        return ok

    return send.make(shape, flags, numbered), by_flags


@lru_cache(CACHED)
def receive_kernel(shape):
    """Makes the kernel that expands the last call's rows if the results had no room for them. It sends nothing."""
    small = by_expert.receiving(shape, stamps.make(shape.trace, BLOCK)) if shape.lamport else None
    all_small = mailbox.all_small(shape.n_ranks, shape.lamport, announced=True)
    has_small, n_announced = bool(shape.lamport), mailbox.numbers_announced(shape.n_ranks)
    await_announcements = announce.awaiting(shape, wait.ROWS_DISPATCH, "header")
    expand_rows = expand.arriving(shape, copy.flags(shape, wait.ROWS_DISPATCH), None)

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_receive(params, num_tokens, my_rank):
        announced = shared_array(n_announced, int32)
        upcoming = calls.read_epoch(calls.Call(params, num_tokens, my_rank, u64(calls.OVER)))
        call = calls.at_epoch(upcoming, u64(upcoming.epoch - u64(1)))       # the last one that ended
        if calls.is_over(upcoming) or not await_announcements(call, announced):
            return
        if has_small and all_small(announced):
            small.receive_all(call, announced)
        else:
            expand_rows(call, announced)

    return rows_receive


@lru_cache(CACHED)
def resend_kernel(shape):
    """Makes the kernel of a dispatch whose layout is in a handle."""
    mark, (_, end_call) = stamps.make(shape.trace, BLOCK), calls.begin_and_end(shape.n_ranks)
    small, expands = small_batch.resending(shape, mark) if shape.lamport else None, shape.expert_major
    begin, has_small = announce.beginning(shape, mark, small), bool(shape.lamport)
    await_announcements = announce.awaiting(shape, wait.ROWS_DISPATCH, "without_counts")
    (send_rows, finish_rows), n_announced = sending_and_finishing(shape, mark), mailbox.numbers_announced(shape.n_ranks)

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_resend(params, num_tokens, my_rank):
        announced, shared_epoch = shared_array(n_announced, int32), shared_array(1, uint64)
        call, prepared = begin(calls.Call(params, num_tokens, my_rank, u64(calls.OVER)), announced, shared_epoch)
        if calls.is_over(call):
            return
        if has_small and small.fits(announced):
            small.rest(call, announced, prepared)
            return
        if expands:
            calls.signal_begun(call)
        if not await_announcements(call, announced):
            return
        mark(params, stamps.COUNTED)
        if expands and calls.is_leader() and not calls.leader_awaits_begun(call, wait.ROWS_DISPATCH):
            return
        if not calls.is_leader():
            send_rows(call, announced)          # without `numbered` it never waits
            mark(params, stamps.SENT)
        if finish_rows(call, announced, True) and calls.is_leader():
            end_call(call)
        mark(params, stamps.LEFT)

    return rows_resend
