"""Dispatch in Lamport rows: rows are sent as soon as tokens are read, while the ranks exchange their counts.

A block that knows all counts stores the rows that arrive. No rank ends the call before all ranks have announced
themselves. If a rank has too many tokens for this, each rank takes back what it has sent, and all use the ordinary way.
If a rank has no room, rows are received and not stored.
"""

from epmoe.device import SIM, device_fn, i32, int32, lane_id, shared_array, syncthreads, u64, warp_broadcast_i32

from ... import stamps
from .. import announce, handle, layout, mailbox, routing
from .. import call as calls
from ..call import Call
from ..shape import BLOCK, namespace, p
from ..wait import ROWS_DISPATCH
from . import lamport, send
from .row_numbers import in_array, in_handle, numbering


def dispatching(shape, mark):
    """Device functions: namespace. fits(num_tokens): whether this rank has few tokens.

    dispatch(call, begun, notes, scratch): of every block -> 0 if the call is over; else its number: some rank has many
    tokens, all ranks go on in the ordinary way, and this rank's rows are numbered and announced.
    """
    ranks, mail, (_, end_call), few = (shape.n_ranks, mailbox.reading(shape.n_ranks),
                                       calls.begin_and_end(shape.n_ranks), shape.lamport)
    announce_places = announce.early(shape, "places", marks=False)
    facts = announce.telling(shape, *announce.parts_of_note(ranks)["facts"])
    announce_experts, all_few = announce.experts(shape), mailbox.all_few(ranks, few, announced=True)
    may_end = announce.closing(shape, ROWS_DISPATCH, "note")
    await_facts = announce.awaiting(shape, ROWS_DISPATCH, "facts", acquires=False)
    number_tokens, record_numbers = numbering(shape, routing.mask_by_thread(shape))
    count_experts = routing.experts_of_ids(shape)
    rows, record = send.make(shape, in_array(ranks)), handle.recording(shape, ROWS_DISPATCH)
    numbered, tokens_of_block = layout.counter(shape, ROWS_DISPATCH), layout.tokens_of(shape)
    mark_own, n_experts, n_numbers = stamps.by_caller(BLOCK, shape.trace), shape.n_experts, ranks * max(few, 1)

    @device_fn
    def fits(num_tokens):
        return not SIM or num_tokens <= few     # the simulator's ranks share a kernel

    @device_fn
    def lead(call, notes, scratch, looked):
        """The leader block announces rows' and experts' counts, records those of all ranks, and ends the call."""
        if calls.is_notify_warp():
            facts.tell(call, i32(scratch.totals[min(lane_id(), ranks - 1)]), looked)
            if lane_id() == 0:
                mark_own(call.params, stamps.ANNOUNCED)
        count_experts(call.params, call.params[p.ids], i32(0), i32(call.num_tokens), scratch.experts)
        syncthreads()                           # the counts of all warps
        announce_experts(call, scratch.experts, 0)
        if not may_end(call, notes):
            return u64(0)
        mark(call.params, stamps.COUNTED)
        if not all_few(notes):
            syncthreads()                       # all warps have read the notes, which are written again
            return call.epoch
        ok = record(call, notes, mail.has_room(notes), scratch.experts)
        mark(call.params, stamps.PLACED)
        if ok:
            end_call(call)
        mark(call.params, stamps.LEFT)
        return u64(0)

    @device_fn
    def send_and_receive(call, notes, numbers, first):
        """The other blocks send at once, and store what comes as soon as they know all counts."""
        rows.send(call, numbers, first)
        mark(call.params, stamps.SENT)
        record_numbers(call, numbers, tokens_of_block(call.num_tokens))
        if not await_facts(call, notes):        # places, which come later, are for the ordinary way
            return u64(0)
        if not all_few(notes):
            rows.erase(call, numbers, first)
            syncthreads()                       # all warps have read the notes, which are written again
            numbered.say(call)
            return call.epoch
        mark(call.params, stamps.COUNTED)
        rows.receive(call, numbers, notes, mail.has_room(notes), first)
        mark(call.params, stamps.COPIED)
        mark(call.params, stamps.LEFT)
        return u64(0)

    @device_fn
    def dispatch(call, begun, notes, scratch):
        numbers, looked = shared_array(n_numbers, int32), (u64(0), u64(0), i32(0))
        if calls.is_fence_warp():
            announce_places(call)
        if calls.is_notify_warp():
            looked = facts.look(call, i32(0))
        if calls.is_leader():
            layout.clear(scratch.experts, n_experts)
        first = rows.prepare(call)
        number_tokens(call, call.params[p.ids], numbers, scratch.totals)
        call = Call(call.params, call.num_tokens, call.my_rank, calls.epoch_of(begun))      # and all numbers
        if call.epoch == u64(0):
            return u64(0)
        mark(call.params, stamps.CLAIMED)
        if calls.is_last_thread():
            calls.say_begun(call.params)
        if calls.is_leader():
            return lead(call, notes, scratch, looked)
        return send_and_receive(call, notes, numbers, first)

    return namespace("few", fits=fits, dispatch=dispatch)


def resending(shape, mark):
    """Device functions for a dispatch whose layout is known: namespace. first: what prepare() gave.

    prepare(call): before the first barrier. fits(notes): the same on all ranks. resend(call, notes, first): the rest of
    the call. Peers announce nothing that it waits for: the counts are known. A rank without room for its own rows takes
    them, and stores nothing.
    """
    ranks, mail = shape.n_ranks, mailbox.reading(shape.n_ranks)
    rows = send.make(shape, in_handle(ranks))

    @device_fn
    def send_and_receive(call, notes, first):
        n_rows, row_of = mail.received(notes, call.my_rank), call.params[p.row_of]
        has_room = i32(warp_broadcast_i32(n_rows, i32(ranks - 1))) <= i32(call.params[p.capacity])
        rows.send(call, row_of, first)
        mark(call.params, stamps.SENT)
        rows.receive(call, row_of, notes, has_room, first)

    all_few = mailbox.all_few(ranks, shape.lamport, announced=False)
    return namespace("few", prepare=rows.prepare, fits=all_few,
                     resend=lamport.beside_leader(shape, ROWS_DISPATCH, mark, send_and_receive))
