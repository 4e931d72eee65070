"""Dispatch in Lamport rows: rows are sent as soon as tokens are read, while the ranks exchange their counts.

A block that knows all counts stores the rows that arrive. No rank ends the call before all ranks have announced
themselves. If a rank has too many tokens for this, each rank takes back what it has sent, and all use the ordinary way.
If a rank has no room, rows are received and not stored.
"""

from epmoe.device import (SIM, block_dim, device_fn, i32, lane_id, load_i32, popc, syncthreads, thread_idx, u32, u64,
                          warp_broadcast_i32)

from ... import stamps
from .. import announce, handle, layout, mailbox, routing
from .. import call as calls
from ..bits import below, has, lanes_for
from ..call import Call
from ..shape import namespace, p
from ..wait import ROWS_DISPATCH
from . import lamport, send


def _tokens_a_word(shape):
    """Tokens whose bits are in one of four words."""
    return -(-shape.tuning.lamport_tokens // 4)


def _bits_of_tokens(shape):
    """Device function (masks, num_tokens) -> in lane r four u32, in turn a bit for each token that goes to rank r.

    masks: shared array, of the ranks that a token goes to.
    """
    ranks, a_word = shape.n_ranks, _tokens_a_word(shape)

    @device_fn
    def word(masks, first, num_tokens):
        lane, mask, mine, rank = i32(lane_id()), u32(0), u32(0), i32(0)
        if lane < a_word and first + lane < num_tokens:
            mask = u32(masks[first + lane])
        while rank < ranks:
            goes = lanes_for(mask, rank)
            if lane == rank:
                mine = goes
            rank = i32(rank + 1)
        return mine

    @device_fn
    def words(masks, num_tokens):
        return (word(masks, i32(0), num_tokens), word(masks, i32(a_word), num_tokens),
                word(masks, i32(2 * a_word), num_tokens), word(masks, i32(3 * a_word), num_tokens))

    return words


def _number_in_bits(shape):
    """Device function (bits, token, lane): number of the token's row among those for rank `lane`, -1 for none.

    bits: four words.
    """
    a_word = _tokens_a_word(shape)

    @device_fn
    def number(bits, token, lane):
        a, b, c, d = bits
        word, before, row = a, i32(0), i32(-1)
        if token >= a_word:
            word, before = b, i32(popc(a))
        if token >= 2 * a_word:
            word, before = c, i32(before + popc(b))
        if token >= 3 * a_word:
            word, before = d, i32(before + popc(c))
        at = u32(u32(token) % u32(a_word))
        if has(word, at):
            row = i32(before + popc(u32(word & below(at))))
        return row

    return number


def _counts(shape):
    """Device function (call) -> in lane r the tokens for rank r of all tokens, few of them, by one warp."""
    ranks, mask_of_token = shape.n_ranks, routing.mask_by_thread(shape)

    @device_fn
    def mask_at(call, token):
        mask = u32(mask_of_token(call.params[p.ids], i32(max(0, min(token, i32(call.num_tokens - 1))))))
        if token >= call.num_tokens:
            mask = u32(0)
        return mask

    @device_fn
    def of_rank(mask, rank):
        return i32(popc(lanes_for(mask, rank)))

    @device_fn
    def count(call):
        lane, mine, first = i32(lane_id()), i32(0), i32(0)
        while first < call.num_tokens:          # four tokens of a lane in flight
            a, b = mask_at(call, i32(first + lane)), mask_at(call, i32(first + 32 + lane))
            c, d = mask_at(call, i32(first + 64 + lane)), mask_at(call, i32(first + 96 + lane))
            rank = i32(0)
            while rank < ranks:
                n = i32(of_rank(a, rank) + of_rank(b, rank) + of_rank(c, rank) + of_rank(d, rank))
                if lane == rank:
                    mine = i32(mine + n)
                rank = i32(rank + 1)
            first = i32(first + 128)
        return mine

    return count


def dispatching(shape, mark):
    """Device functions: namespace. fits(num_tokens): whether this rank has few tokens.

    dispatch(call, begun, notes, scratch): of every block -> 0 if the call is over; else its number: some rank has many
    tokens, all ranks go on in the ordinary way, and this rank's rows are numbered and announced.
    """
    mail, (_, end_call), few = mailbox.reading(shape.n_ranks), calls.begin_and_end(shape.n_ranks), shape.lamport
    announce_places = announce.early(shape, "places", marks=False)
    announce_facts = announce.early(shape, "facts", fences=False, counts_of=_counts(shape))
    announce_experts, all_few = announce.experts(shape), mailbox.all_few(shape.n_ranks, few, announced=True)
    await_note = announce.awaiting(shape, ROWS_DISPATCH, "note")
    await_facts = announce.awaiting(shape, ROWS_DISPATCH, "facts", acquires=False)
    mask_of_token, count_experts = routing.mask_by_thread(shape), routing.experts_of_ids(shape)
    bits_of, number_few, tokens_of_block = _bits_of_tokens(shape), layout.numbering_few(shape), layout.tokens_of(shape)
    rows, record = send.make(shape, _number_in_bits(shape)), handle.recording(shape, ROWS_DISPATCH)
    numbered, n_experts = layout.counter(shape, ROWS_DISPATCH), shape.n_experts

    @device_fn
    def fits(num_tokens):
        return not SIM or num_tokens <= few     # the simulator's ranks share a kernel

    @device_fn
    def look_at_tokens(call, begun, scratch):
        """Masks of the ranks of all tokens -> this call's number."""
        token = i32(thread_idx())
        while token < call.num_tokens:
            scratch.masks[token] = i32(mask_of_token(call.params[p.ids], token))
            token = i32(token + block_dim())
        return calls.epoch_of(begun)            # and the masks of all threads

    @device_fn
    def number_rows(call, scratch):
        first, end = tokens_of_block(call.num_tokens)
        number_few(call, scratch, first, end)   # await_facts, which follows, is a barrier

    @device_fn
    def sum_experts(call, scratch):
        layout.clear(scratch.experts, n_experts)
        syncthreads()                           # zeros before sums
        count_experts(call.params, call.params[p.ids], i32(0), i32(call.num_tokens), scratch.experts)
        syncthreads()

    @device_fn
    def lead(call, notes, scratch):
        """The leader block announces experts' counts, records those of all ranks, and ends the call."""
        sum_experts(call, scratch)
        announce_experts(call, scratch.experts, 0)
        if not await_note(call, notes):
            return u64(0)
        mark(call.params, stamps.COUNTED)
        if not all_few(notes):
            syncthreads()                       # all warps have read the notes, which are written again
            return call.epoch
        ok = record(call, notes, mail.has_room(notes), scratch.experts) and calls.all_begun(call.params, ROWS_DISPATCH)
        mark(call.params, stamps.PLACED)
        if ok:
            end_call(call)
        mark(call.params, stamps.LEFT)
        return u64(0)

    @device_fn
    def send_and_receive(call, notes, scratch, first):
        """The other blocks send at once, and store what comes as soon as they know all counts."""
        bits = bits_of(scratch.masks, call.num_tokens)
        rows.send(call, bits, first)
        mark(call.params, stamps.SENT)
        number_rows(call, scratch)
        if not await_facts(call, notes):        # places, which come later, are for the ordinary way
            return u64(0)
        if not all_few(notes):
            rows.erase(call, bits, first)
            syncthreads()                       # all warps have read the notes, which are written again
            numbered.say(call)
            return call.epoch
        mark(call.params, stamps.COUNTED)
        rows.receive(call, bits, notes, mail.has_room(notes), first)
        mark(call.params, stamps.COPIED)
        mark(call.params, stamps.LEFT)
        return u64(0)

    @device_fn
    def dispatch(call, begun, notes, scratch):
        if calls.is_fence_warp():
            announce_places(call)
        if calls.is_notify_warp():
            announce_facts(call)
        first = rows.prepare(call)
        call = Call(call.params, call.num_tokens, call.my_rank, look_at_tokens(call, begun, scratch))
        if call.epoch == u64(0):
            return u64(0)
        mark(call.params, stamps.CLAIMED)
        if calls.is_last_thread():
            calls.say_begun(call.params)
        if calls.is_leader():
            return lead(call, notes, scratch)
        return send_and_receive(call, notes, scratch, first)

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
