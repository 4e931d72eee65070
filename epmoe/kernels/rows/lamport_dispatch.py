"""Dispatch in Lamport rows: they leave as soon as tokens are looked at, while the ranks tell each other their counts.

Who knows all counts stores the rows that come; nobody ends the call before all have announced themselves. If a rank has
more tokens than go this way, each rank takes back what it has sent, and all go the ordinary way. If one has no room,
rows are received and not stored.
"""

from types import SimpleNamespace

from epmoe.device import SIM, device_fn, i32, u32

from . import lamport_sending, tagged, tagged_dispatch, tagged_sending, token_bits
from .status import ROWS_DISPATCH
from .tagged_dispatch import never_goes, never_resend


def ahead(shape, block):
    """Device functions for the kernel of a dispatch, of blocks other than the clerk's; few: of this rank's tokens.

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
                           all_few=tagged.all_few(shape, few, told=True))


def resending(shape, block, of_block, meeting, mark):
    """Device functions (prepare, goes_this_way, resend) for a dispatch whose layout is known.

    As those of tagged_dispatch.py. A rank without room for its own rows takes them, and stores nothing. Where tagged
    rows may go instead, it is these that are prepared before the first barrier.
    """
    if not shape.lamport:
        return _never_prepare, never_goes, never_resend
    sending = lamport_sending.make(shape, block, ROWS_DISPATCH, tagged_sending.in_handle(shape.n_ranks))
    prepare, prepare_first, by_now = sending.prepare, sending.prepare, tagged_dispatch.prepared_before
    if shape.tags:
        prepare_first, by_now = _never_prepare, _prepared_late(prepare)
    resend = tagged_dispatch.resender(shape, block, of_block, meeting, mark, by_now, sending.send, sending.receive)
    return prepare_first, tagged.all_few(shape, shape.lamport, told=False), resend


def _prepared_late(prepare):
    @device_fn
    def prepare_now(params, num_tokens, my_rank, x, nothing):
        return prepare(params, num_tokens, my_rank, x)

    return prepare_now


@device_fn
def _nothing():
    return i32(0)


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


_NEVER = SimpleNamespace(are_few=never_goes, nothing_known=_nothing, unprepared=_nothing, prepare=_never_prepare,
                         send=_never_send, receive=_never_receive, erase=_never_erase, all_few=never_goes)
