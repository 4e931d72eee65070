"""Dispatch in Lamport rows: rows are sent as soon as tokens are read, while the ranks exchange their counts.

A block that knows all counts stores the rows that arrive. No rank ends the call before all ranks have announced
themselves. If a rank has too many tokens for this, each rank takes back what it has sent, and all use the ordinary way.
If a rank has no room, rows are received and not stored.
"""

from types import SimpleNamespace

from epmoe.device import (SIM, block_dim, device_fn, i32, load_i32, thread_idx, u32, u64, warp_broadcast_i32)

from .. import stamps
from . import exchange, lamport_sending, peers, roles, token_bits
from .status import ROWS_DISPATCH


def ahead(shape, block):
    """Device functions for the kernel of a dispatch, of blocks other than the leader block's; few: of this rank's tokens.

    are_few(num_tokens): whether these functions are for this rank. unprepared(), prepare(params, num_tokens, my_rank,
    x): before the first barrier. nothing_known(): `known` before send(). send(params, epoch, num_tokens, my_rank, x,
    masks, prepared) -> known: this warp's share; masks: shared, of all tokens' ranks. all_few(notes): whether all ranks
    have few, so that rows have come this way. receive(params, epoch, num_tokens, my_rank, x, known, notes, has_room,
    prepared); erase(params, epoch, num_tokens, my_rank, known, prepared): what has been sent and nobody receives.
    """
    if not shape.lamport:
        return _NEVER
    bits_of, few = token_bits.four_words(shape), shape.lamport
    sending = lamport_sending.make(shape, block, ROWS_DISPATCH, token_bits.in_four_words)
    send_all = sending.send

    @device_fn
    def are_few(num_tokens):
        return not SIM or num_tokens <= few     # the simulator's ranks share a kernel

    @device_fn
    def send(params, epoch, num_tokens, my_rank, x, masks, prepared):
        bits = bits_of(masks, num_tokens)
        send_all(params, epoch, num_tokens, my_rank, x, bits, prepared)
        return bits

    @device_fn
    def nothing_known():
        return u32(0), u32(0), u32(0), u32(0)

    return SimpleNamespace(are_few=are_few, nothing_known=nothing_known, unprepared=sending.unprepared,
                           prepare=sending.prepare, send=send, receive=sending.receive, erase=sending.erase,
                           all_few=peers.all_few(shape, few, told=True))


def resending(shape, block, of_block, meeting, mark):
    """Device functions (prepare, goes_this_way, resend) for a dispatch whose layout is known.

    prepare(params, num_tokens, my_rank, x): before the first barrier. goes_this_way(notes): the same on all ranks.
    resend(params, epoch, num_tokens, my_rank, x, row_of, notes, prepared): the rest of the call. Peers announce nothing
    that it waits for: the counts are known. A rank without room for its own rows takes them, and stores nothing.
    """
    if not shape.lamport:
        return _never_prepare, _never_goes, _never_resend
    ranks, say_begun, p_capacity = shape.n_ranks, of_block.say_begun, block.index("capacity")
    sending = lamport_sending.make(shape, block, ROWS_DISPATCH, _in_handle(ranks))
    send, receive = sending.send, sending.receive
    end, (_, _, _, received, _) = exchange.ending(of_block, meeting.await_notes, ROWS_DISPATCH), peers.sums(ranks)

    @device_fn
    def resend(params, epoch, num_tokens, my_rank, x, row_of, notes, prepared):
        if thread_idx() == block_dim() - 1:
            say_begun(params)
        if roles.is_clerk():
            end(params, epoch, my_rank, notes)
        else:
            n_rows = i32(warp_broadcast_i32(received(notes, my_rank), i32(ranks - 1)))
            has_room = n_rows <= i32(params[p_capacity])
            send(params, epoch, num_tokens, my_rank, x, row_of, prepared)
            mark(params, stamps.SENT)
            receive(params, epoch, num_tokens, my_rank, x, row_of, notes, has_room, prepared)
        mark(params, stamps.LEFT)

    return sending.prepare, peers.all_few(shape, shape.lamport, told=False), resend


def _in_handle(ranks):
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


@device_fn
def _nothing():
    return i32(0)


@device_fn
def _never_goes(notes):
    return False


@device_fn
def _never_resend(params, epoch, num_tokens, my_rank, x, row_of, notes, prepared):
    return


@device_fn
def _never_prepare(params, num_tokens, my_rank, x):
    return i32(0)


@device_fn
def _never_send(params, epoch, num_tokens, my_rank, x, masks, prepared):
    return i32(0)


@device_fn
def _never_receive(params, epoch, num_tokens, my_rank, x, known, notes, has_room, prepared):
    return True


@device_fn
def _never_erase(params, epoch, num_tokens, my_rank, known, prepared):
    return


_NEVER = SimpleNamespace(are_few=_never_goes, nothing_known=_nothing, unprepared=_nothing, prepare=_never_prepare,
                         send=_never_send, receive=_never_receive, erase=_never_erase, all_few=_never_goes)
