"""Dispatch of rows: every token is sent once to each rank of its experts.

The last block of a rank's launch (the leader block) talks to the peers; it announces this rank by its last warp (the
notify warp), and its tokens by expert with all warps. The other blocks send. Expert-major also expands rows (copies
them to the rows of their experts): the first warps of each sending block send (shape.sending.tenths of them), and all
others expand, also those of the leader block. Warps that have finished sending join them. If there are no more tokens
than sending blocks, all warps of these blocks send first. Rows may be encoded (bf16 to FP8) on the way.

1. Begin: read the last call's number, and whether an earlier wait of this rank has expired, after which nothing runs
   (call.py). This call's number (epoch) is one more.
2. Small batches (at most RowsShape.lamport tokens on every rank) are sent as Lamport rows, on a path of their own that
   ends the call (small/dispatch.py): every word is its own ready flag, and a receiver polls a row's words until all
   have come. Expert-major also expands them as they arrive (small/by_expert.py). If some rank has more tokens, or room
   for fewer rows than all ranks have tokens, all ranks go on with step 4, rows numbered (expert-major: by step 3).
3. Number the rows (layout.py): the n-th of this rank's tokens that go to a rank is the n-th row that this rank sends
   there. The handle's row_of [T, R] has the numbers, -1 where a token does not go. Blocks count in shared arrays
   (`scratch`). Meanwhile the leader block announces this rank, and how many tokens each expert gets (announce.py).
4. Wait (ld.acquire.sys) for the announcements of all ranks, which were stored with st.relaxed.sys after a
   fence.acq_rel.sys. Each block keeps their numbers (`announced`). They tell where this rank's rows begin at each rank.
5. Send (send.py) each row to its final place, with its metadata (ids, probs, scales). If some rank has no room to
   receive all its rows (capacity), nobody sends. This happens only in calls whose hosts wait: they make room and repeat
   the call. If there are more tokens than blocks that send, warps claim parts of all tokens. Before a warp reads the
   numbers of another block's token, it waits until all blocks have numbered theirs.
6. Meanwhile the leader block waits for the numbers of tokens by expert, and records the counts in the handle.
   Expert-major, it also records where experts' rows begin, and whether they and their padding exceed num_rows
   (overflow). Rows from num_rows on are dropped: their output row is -1 in expand.py (_expert_rows) and in
   small/by_expert.py (kept). If the host waits for the counts, the leader block stores them in host memory (`told`),
   and then told_number, for which the host polls (handle.py).
7. Finish. A receiver learns in one of two ways that rows have arrived:
   Counters (by_counters): when a sending block has written its rows, if any, it passes a barrier and adds one to its
   rank's counter at every rank (red.release.sys). The leader block waits until each counter has reached the number of
   blocks that its rank has announced (ld.acquire.sys).
   Flags (by_flags), expert-major: senders raise a flag for each part of a row (st.release.sys). The leader block sets
   RECORDED in expand_rows (st.release.gpu), when `record` has written where experts' rows begin. Other warps wait for
   it, and expand the parts that have arrived (ld.acquire.sys; expand.py). Rows of a rank to itself stay in the input
   unless they are encoded: only their metadata travels, with the flag of part 0.
8. The leader block ends the call when all ranks have announced themselves (step 4) and all blocks of this rank have
   begun: its counter shows that, in expert-major BEGUN (signal_begun before step 4, leader_awaits_begun after step 6).
   There other blocks may still expand: results are complete when the launch has ended.

Two more kernels. rows_resend is a cached dispatch: it takes numbers and counts from a handle. It announces this rank,
without counts, in step 1, and has no steps 3 and 6. rows_receive only expands. An expert-major dispatch whose host
waits has results for `out_rows` rows, a guess from recent calls. If there are more rows, it expands none. The host
learns their number, makes room, and launches rows_receive on this rank alone.
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
    most_small, has_small, expert_major = shape.lamport, bool(shape.lamport), shape.expert_major
    if has_small:
        dispatch_small = (by_expert.dispatching(shape, mark, number_rows) if expert_major
                          else small_batch.dispatching(shape, mark))
    await_announcements = announce.awaiting(shape, wait.ROWS_DISPATCH, "header")
    send_rows, finish_rows = sending_and_finishing(shape, mark, layout.counter(shape))
    record, has_room = handle.recording(shape), mailbox.reading(shape.n_ranks).has_room

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_dispatch(params, num_tokens, my_rank):
        announced, scratch, shared_epoch = shared_array(n_announced, int32), allocate(), shared_array(1, uint64)
        mark(params, stamps.START)                      # a stamp of the time, if shape.trace
        # the call's number: here OVER means that it has not begun, later that this block is done or a wait has expired
        call = calls.Call(params, num_tokens, my_rank, u64(calls.OVER))
        at_entry = begin_call(params, shared_epoch)     # 1: has a wait expired, last call's number; only in thread 0
        # on GPUs, kernels of ranks with more tokens lack this path (lamport.rows_for); simulated ranks share a kernel
        if has_small and (not SIM or num_tokens <= most_small):
            epoch = dispatch_small(call, at_entry, announced, scratch)   # 2
        else:
            epoch = number_rows(call, at_entry, scratch)                 # 3
        if epoch == u64(calls.OVER):            # step 2 has ended the call, or a wait has expired
            return
        call = calls.at_epoch(call, epoch)
        if expert_major:                        # otherwise the counters show that a block has begun
            calls.signal_begun(call)
        if not await_announcements(call, announced):                     # 4
            return
        mark(params, stamps.COUNTED)
        if not calls.is_leader():
            ok = send_rows(call, announced)                              # 5
            mark(params, stamps.SENT)
        else:
            ok = record(call, announced, has_room(announced), scratch.experts)   # 6
            ok = ok and (not expert_major or calls.leader_awaits_begun(call, wait.ROWS_DISPATCH))
            mark(params, stamps.PLACED)
        if finish_rows(call, announced, ok) and calls.is_leader():       # 7
            end_call(call)                                               # 8
        mark(params, stamps.LEFT)

    return rows_dispatch


def numbering(shape, mark):
    """Device function number_rows(call, at_entry, scratch) -> this call's number, or OVER if a wait has expired.

    When it returns, a sending block has numbered its own tokens, and the leader block has announced this rank and how
    many tokens each expert gets.
    """
    ranks, steps = shape.n_ranks, layout.make(shape)
    announcement, announce_experts = announce.announcing(shape, "header"), announce.experts(shape)

    @device_fn
    def number_rows(call, at_entry, scratch):
        words = (u64(0), u64(0), i32(0), i32(0))        # what load() returns; only the notify warp uses it
        if calls.is_notify_warp():
            fence_acq_rel_sys()                 # orders earlier launches of this rank before what it announces
            words = announcement.load(call, i32(0))
        call = calls.at_epoch(call, steps.count_and_publish(call, at_entry, scratch))
        if calls.is_over(call):
            return u64(calls.OVER)
        mark(call.params, stamps.CLAIMED)
        if not calls.is_leader():
            ok = steps.number(call, scratch)
        else:
            if calls.is_notify_warp():
                announcement.announce_totals(call, scratch.totals, words)
            ok = steps.sum_experts(call, scratch)
            if ok:
                announce_experts(call, scratch.totals, ranks)
        return call.epoch if ok else u64(calls.OVER)

    return number_rows


def sending_and_finishing(shape, mark, numbered=None):
    """(send_rows, finish_rows). send_rows: see send.make. finish_rows(call, announced, ok) -> whether all is well.

    ok: whether this warp's waits have succeeded so far. The leader block needs the result. By counters, senders signal
    and the leader block waits. By flags (expert-major), every block expands rows, if all ranks had room to receive.
    numbered: see send.make.
    """
    if not shape.expert_major:
        arrivals = announce.arrivals(shape)

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
    """Makes the kernel that expands the last call's rows if they were more than out_rows. It sends nothing."""
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
    begin = announce.beginning(shape, mark, small_batch.resending(shape, mark) if shape.lamport else None)
    expert_major = shape.expert_major
    await_announcements = announce.awaiting(shape, wait.ROWS_DISPATCH, "without_counts")
    (send_rows, finish_rows), n_announced = sending_and_finishing(shape, mark), mailbox.numbers_announced(shape.n_ranks)

    @kernel(max_threads=shape.threads, words=BLOCK.n_words)
    def rows_resend(params, num_tokens, my_rank):
        announced = shared_array(n_announced, int32)
        call, goes_on = begin(calls.Call(params, num_tokens, my_rank, u64(calls.OVER)), announced)
        if not goes_on:
            return
        if expert_major:
            calls.signal_begun(call)
        if not await_announcements(call, announced):
            return
        mark(params, stamps.COUNTED)
        if expert_major and calls.is_leader() and not calls.leader_awaits_begun(call, wait.ROWS_DISPATCH):
            return
        if not calls.is_leader():
            send_rows(call, announced)          # cannot fail: without `numbered` it waits for nothing
            mark(params, stamps.SENT)
        if finish_rows(call, announced, True) and calls.is_leader():
            end_call(call)
        mark(params, stamps.LEFT)

    return rows_resend
