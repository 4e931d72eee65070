"""Dispatch in Lamport rows: rows are sent as soon as tokens are read, while the ranks exchange their counts.

A block that knows all counts stores the rows that arrive. No rank ends the call before all ranks have announced
themselves. If a rank has too many tokens for this, each rank takes back what it has sent, and all use the ordinary way.
If a rank has no room, rows are received and not stored.
"""

from epmoe.device import (SIM, block_dim, device_fn, i32, int32, lane_id, load_i32, n_warps, popc, shared_array,
                          store_i32, syncthreads, thread_idx, u32, u64, warp_broadcast_i32, warp_id)

from ... import stamps
from .. import announce, handle, layout, mailbox, routing
from .. import call as calls
from ..bits import below, has, lanes_for
from ..call import Call
from ..shape import BLOCK, namespace, p
from ..wait import ROWS_DISPATCH
from . import lamport, send


def _numbering(shape):
    """Device function (call, numbers, totals): rows of all tokens, few of them, by a block, a warp a rank.

    numbers [token, rank], a shared array: the number of a token's row among those for a rank, -1 for none. totals[rank]:
    how many there are.
    """
    ranks, mask_of_token = shape.n_ranks, routing.mask_by_thread(shape)

    @device_fn
    def mask_at(call, token):
        mask = u32(mask_of_token(call.params[p.ids], i32(max(0, min(token, i32(call.num_tokens - 1))))))
        if token >= call.num_tokens:
            mask = u32(0)
        return mask

    @device_fn
    def number_lanes(call, numbers, rank, token, mask, total):
        """A token a lane; total: rows of the tokens before. The total with these."""
        goes, row = lanes_for(mask, rank), i32(-1)
        if has(mask, rank):
            row = i32(total + popc(u32(goes & below(i32(lane_id())))))
        if token < call.num_tokens:
            numbers[token * ranks + rank] = row
        return i32(total + popc(goes))

    @device_fn
    def number_rows(call, numbers, totals):
        rank = i32(warp_id())
        while rank < ranks:
            total, token = i32(0), i32(lane_id())
            while token - lane_id() < call.num_tokens:          # four tokens of a lane in flight
                a, b = mask_at(call, token), mask_at(call, i32(token + 32))
                c, d = mask_at(call, i32(token + 64)), mask_at(call, i32(token + 96))
                total = number_lanes(call, numbers, rank, token, a, total)
                total = number_lanes(call, numbers, rank, i32(token + 32), b, total)
                total = number_lanes(call, numbers, rank, i32(token + 64), c, total)
                total = number_lanes(call, numbers, rank, i32(token + 96), d, total)
                token = i32(token + 128)
            if lane_id() == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())

    return number_rows


def _number_in_array(ranks):
    """Device function (numbers, token, lane) -> number of the token's row among those for rank `lane`, -1 for none."""
    @device_fn
    def number(numbers, token, lane):
        row = i32(-1)
        if lane < ranks:
            row = i32(numbers[token * ranks + lane])
        return row

    return number


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
    number_rows, count_experts = _numbering(shape), routing.experts_of_ids(shape)
    rows, record = send.make(shape, _number_in_array(ranks)), handle.recording(shape, ROWS_DISPATCH)
    numbered, tokens_of_block = layout.counter(shape, ROWS_DISPATCH), layout.tokens_of(shape)
    mark_own, n_experts, n_numbers = stamps.by_caller(BLOCK, shape.trace), shape.n_experts, ranks * max(few, 1)

    @device_fn
    def fits(num_tokens):
        return not SIM or num_tokens <= few     # the simulator's ranks share a kernel

    @device_fn
    def record_numbers(call, numbers):
        """Those of the block's tokens, for the handle."""
        first, end = tokens_of_block(call.num_tokens)
        i = i32(first * ranks + thread_idx())
        while i < end * ranks:
            store_i32(call.params[p.row_of] + u64(4) * u64(i), i32(numbers[i]))
            i = i32(i + block_dim())

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
        record_numbers(call, numbers)
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
        number_rows(call, numbers, scratch.totals)
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
    ranks, mail, rows = shape.n_ranks, mailbox.reading(shape.n_ranks), send.make(shape, _number_in_handle(shape.n_ranks))

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


def _number_in_handle(ranks):
    """Device function (row_of, token, lane) -> number of the token's row among those for rank `lane`, -1 for none.

    row_of: address of a handle's array.
    """
    @device_fn
    def number(row_of, token, lane):
        row = i32(-1)
        if lane < ranks:
            row = i32(load_i32(u64(row_of) + u64(4) * u64(token * ranks + lane)))
        return row

    return number
