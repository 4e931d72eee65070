"""Dispatch of few tokens, in tagged rows: sent as soon as their ids are known, for which nobody needs to have announced
himself.

Each rank tells at once how many rows it has for whom; who knows that stores the rows that come. Behind a fence, in its
own time, the clerk tells where arrays lie. Peers write there only if one of them has many tokens, and then all go the
ordinary way, as though nothing had been sent; and nobody ends the call before it has heard that of all: it says that
the launches before this one have ended, and their words may be overwritten in the call after this one.
"""

from epmoe.device import (block_dim, device_fn, i32, lane_id, load_i32, load_u64, popc, store_i32, thread_idx, u32, u64,
                          warp_broadcast_i32)

from .. import stamps
from . import exchange, layout, numbering, peers, roles, routing, tagged, tagged_sending
from .status import ROWS_DISPATCH


def dispatching(shape, block, of_block, meeting, record_few, mark, mark_own):
    """Device function (params, num_tokens, my_rank, words, ids, x, begun, notes, scratch) -> whether the call is over.

    Of every block, where this rank has few tokens; what it is given is as in rows_dispatch.
    """
    if not shape.tags:
        return never
    epoch_now, goes_on, say_begun, end = of_block.epoch_now, of_block.goes_on, of_block.say_begun, of_block.end
    ranks, n_experts, all_have_few = shape.n_ranks, shape.n_experts, tagged.all_few(shape, shape.tags, told=True)
    number, bits_by_rank, has_room = tagged_sending.in_bits(ranks), numbering.bits_by_rank(shape), peers.room(ranks)
    sending = tagged_sending.make(shape, block, ROWS_DISPATCH, number, is_looked_up=False)
    prepare, send, receive, count_slots = sending.prepare, sending.send, sending.receive, sending.count_slots
    (look, tell), await_facts = meeting.announce_facts, meeting.await_facts
    herald_places = exchange.heralding(epoch_now, meeting.announce_places, stamps.by_caller(block, False))
    may_end = exchange.closing(of_block, meeting.await_notes, ROWS_DISPATCH)
    look_for_bad_ids, p_rows = routing.experts_of_ids(shape, block, counts=False), block.offset("row_of")

    @device_fn
    def record_numbers(params, num_tokens, bits):
        """A warp: the handle's row_of."""
        rows, lane, token = u64(load_u64(params + u64(p_rows))), i32(lane_id()), i32(0)
        while token < num_tokens:
            if lane < ranks:
                store_i32(rows + u64(4) * u64(token * ranks + lane), number(u64(bits), token, lane))
            token = i32(token + 1)

    @device_fn
    def dispatch(params, num_tokens, my_rank, words, ids, x, begun, notes, scratch):
        is_clerk, bits, now, looked = roles.is_clerk(), u32(0), u64(0), (u64(0), u64(0), i32(0))
        if roles.is_keeper():
            herald_places(params, words, num_tokens, my_rank, u64(0))
        if roles.is_herald():
            looked, now = look(params, num_tokens, my_rank, i32(0)), epoch_now(words)
        prepared = prepare(params, num_tokens, my_rank, x, u64(0))
        if not is_clerk or roles.is_herald():
            bits = bits_by_rank(ids, num_tokens)
        if roles.is_herald():
            if now != u64(0):
                tell(params, now, num_tokens, my_rank, i32(popc(bits)), looked)
                if lane_id() == 0:
                    mark_own(params, stamps.ANNOUNCED)
        if is_clerk:
            layout.clear(scratch[1], n_experts)
        epoch = goes_on(begun)
        if epoch == u64(0):
            return True
        mark(params, stamps.CLAIMED)
        if thread_idx() == block_dim() - 1:
            say_begun(params)
        ok = True
        if is_clerk:
            ok = may_end(params, epoch, my_rank, notes)
        else:
            send(params, epoch, num_tokens, my_rank, x, u64(bits), prepared)
            mark(params, stamps.SENT)
            ok = await_facts(params, epoch, my_rank, notes)
        if not ok:
            return True
        mark(params, stamps.COUNTED)
        if not all_have_few(notes):
            return False
        has_it = has_room(notes)
        if is_clerk:
            if roles.is_herald():
                record_numbers(params, num_tokens, bits)
            look_for_bad_ids(params, ids, i32(0), num_tokens, scratch[1])
            ok = count_slots(params, epoch, my_rank, notes, scratch[1])
            record_few(params, notes, has_it, scratch[1], scratch[4])
            mark(params, stamps.PLACED)
            if ok:
                end(params, epoch, my_rank)
        elif has_it:
            receive(params, epoch, my_rank, notes)
            mark(params, stamps.COPIED)
        mark(params, stamps.LEFT)
        return True

    return dispatch


def resending(shape, block, of_block, meeting, mark):
    """Device functions (prepare, goes_this_way, resend) for a dispatch whose layout is known.

    prepare(params, num_tokens, my_rank, x, row_of): before the first barrier. goes_this_way(notes): the same on all
    ranks. resend(params, epoch, num_tokens, my_rank, x, row_of, notes, prepared): the rest of the call. Peers tell
    nothing that it waits for: the counts are known, and who has room for its own rows stores them.
    """
    if not shape.tags:
        return _never_prepare, never_goes, never_resend
    in_handle = tagged_sending.in_handle(shape.n_ranks)
    sending = tagged_sending.make(shape, block, ROWS_DISPATCH, in_handle, is_looked_up=True)
    receive_rows = sending.receive

    @device_fn
    def receive(params, epoch, num_tokens, my_rank, x, row_of, notes, has_room, prepared):
        if has_room:
            receive_rows(params, epoch, my_rank, notes)

    resend = resender(shape, block, of_block, meeting, mark, prepared_before, sending.send, receive)
    return sending.prepare, tagged.all_few(shape, shape.tags, told=False), resend


def resender(shape, block, of_block, meeting, mark, prepared_by_now, send, receive):
    """Device function resend() of resending(), of rows that say themselves that they have come.

    prepared_by_now(params, num_tokens, my_rank, x, prepared) -> what send() takes; send() and receive(): as those of
    lamport_sending.py, of no block that is the clerk.
    """
    ranks, say_begun, p_capacity = shape.n_ranks, of_block.say_begun, block.offset("capacity")
    end, (_, _, _, received, _) = exchange.ending(of_block, meeting.await_notes, ROWS_DISPATCH), peers.sums(ranks)

    @device_fn
    def resend(params, epoch, num_tokens, my_rank, x, row_of, notes, given):
        if thread_idx() == block_dim() - 1:
            say_begun(params)
        if roles.is_clerk():
            end(params, epoch, my_rank, notes)
        else:
            prepared = prepared_by_now(params, num_tokens, my_rank, x, given)
            n_rows = i32(warp_broadcast_i32(received(notes, my_rank), i32(ranks - 1)))
            has_room = n_rows <= i32(load_i32(params + u64(p_capacity)))
            send(params, epoch, num_tokens, my_rank, x, row_of, prepared)
            mark(params, stamps.SENT)
            receive(params, epoch, num_tokens, my_rank, x, row_of, notes, has_room, prepared)
        mark(params, stamps.LEFT)

    return resend


@device_fn
def prepared_before(params, num_tokens, my_rank, x, prepared):
    """For resender(): what has been prepared before the first barrier."""
    return prepared


@device_fn
def never(params, num_tokens, my_rank, words, ids, x, begun, notes, scratch):
    """What dispatching() gives for kernels that no tokens are few for: the call goes on in the ordinary way."""
    return False


@device_fn
def _never_prepare(params, num_tokens, my_rank, x, row_of):
    return i32(0)


@device_fn
def never_goes(notes):
    """Of kernels that no tokens are few for: whether a call goes this way."""
    return False


@device_fn
def never_resend(params, epoch, num_tokens, my_rank, x, row_of, notes, prepared):
    """And what would then be done."""
    return
