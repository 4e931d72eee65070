"""Dispatch in Lamport rows: sends rows as soon as tokens are read, while the ranks exchange their counts.

Every block numbers all tokens. The leader block announces and records the counts, and ends the call when all ranks have
announced themselves. Of the other blocks some send; the rest wait for all counts, and store arriving rows (send.py). If
a rank has too many tokens for this path, or no room for the tokens of all ranks, each rank resets the words that it has
sent, and all ranks go on with step 4 of ../dispatch.py.
"""

from epmoe.device import (device_fn, i32, int32, shared_array, store_u32, store_u64, syncthreads, u32, u64,
                          warp_broadcast_i32, warp_broadcast_u64)

from ... import stamps
from ...params import chosen, clear, word_in
from .. import announce, handle, layout, mailbox, routing, wait
from .. import call as calls
from ..copy import copying
from ..send import loading_choices, sending_choices
from ..shape import BLOCK, arrays, memory_of, namespace, p
from . import lamport, send
from .lamport import put

NO_ID, MINUS_ONE = 2**32 - 1, 2**64 - 1     # -1 as 4 bytes and as 8


def _tokens(shape, number):
    """`tokens` for send.make: the n-th row for a rank is the n-th of its window, with ids, probs and scales.

    number: device function (known, token, lane) -> number of the token's row among those for rank `lane`, -1 for none.
    """
    (n_ids, n_probs, _), n_parts = lamport.words_with(shape), lamport.n_parts_of(shape)
    at, load_choices = lamport.addresses(shape), loading_choices(shape)

    @device_fn
    def load(params, token, part, lane, is_wanted):
        return load_choices(params, token, lane) if is_wanted and part == n_parts else (i32(-1), u32(0))

    row = device_fn(lambda known, token, seen, lane: number(known, token, lane))

    @device_fn
    def put_choice(to, k, local_expert, prob):
        put(at.word(to[0], k), local_expert, to[1])
        if n_probs > 0:
            put(at.word(to[0], i32(n_ids + k)), prob, to[1])

    of_rank = device_fn(lambda where, rank: (u64(warp_broadcast_u64(where[0], rank)), where[1]))
    put_scale = device_fn(lambda to, i, word: put(at.word(to[0], i32(n_ids + n_probs + i)), word, to[1]))
    send_choices = sending_choices(shape, namespace("into", of=of_rank, choice=put_choice, scale=put_scale))

    @device_fn
    def send_metadata(call, token, seen, mask, to, lane):
        send_choices(call.params, token, seen, mask, (to, call.epoch), lane)

    return namespace("tokens", load=load, row=row, send=send_metadata)


def _into(shape, number):
    """`into` for send.make: rows and their metadata go where the announced counts say. number: as in _tokens."""
    (n_ids, n_probs, n_scales), row_bytes, rows = lamport.words_with(shape), shape.row_bytes, copying(read_only=True)
    n_all, mail, memory = n_ids + n_probs + n_scales, mailbox.reading(shape.n_ranks), memory_of(shape.n_ranks)
    at, taking, place_of = lamport.addresses(shape), lamport.taking(wait.ROWS_DISPATCH), chosen(BLOCK, "places")

    @device_fn
    def own_array(call, index):
        """Address of this rank's array `index` of the call."""
        return u64(memory.pool(call.params, call.my_rank) + place_of(call.params, index))

    arriving = device_fn(lambda call, announced: mail.received(announced, call.my_rank))
    own_row = device_fn(lambda call, known, token, lane: warp_broadcast_i32(number(known, token, lane), call.my_rank))
    row_of = device_fn(lambda known, src_rank, row: row)

    @device_fn
    def store(call, known, found, batch, span, scale, lane):
        to = own_array(call, arrays.rows) + u64(found[2]) * u64(row_bytes)
        rows.store(batch, to, u32(1), i32(0), span[0], span[1], lane)

    @device_fn
    def receive(call, known, found, row_at, lane):
        (src_rank, _, row), ok, i = found, True, i32(lane)
        while ok and i - lane < n_all:
            word = at.word(row_at, i) if i < n_all else u64(0)
            ok, (data, _, _, _) = taking.words(call, src_rank, i32(0), (word, u64(0), u64(0), u64(0)))
            if ok:
                if i < n_ids:
                    value = u64(MINUS_ONE) if data == u32(NO_ID) else u64(data)
                    store_u64(own_array(call, arrays.row_ids) + u64(8) * (u64(row) * u64(n_ids) + u64(i)), value)
                elif i < n_ids + n_probs:
                    store_u32(word_in(own_array(call, arrays.row_probs), row, n_probs, i - n_ids), data)
                elif i < n_all:
                    store_u32(word_in(own_array(call, arrays.row_scales), row, n_scales, i - n_ids - n_probs), data)
            i = i32(i + 32)
        return ok

    return namespace("into", arriving=arriving, own_row=own_row, row_of=row_of, store=store, receive=receive)


def dispatching(shape, mark):
    """Device function dispatch(call, at_entry, announced, scratch), called by all blocks of a rank with few tokens.

    It returns OVER, or else the call's number: then some rank has too many tokens or too little room, this rank's rows
    are numbered and announced, and all ranks go on with step 4 of ../dispatch.py.
    """
    ranks, (_, end_call) = shape.n_ranks, calls.begin_and_end(shape.n_ranks)
    announce_places = announce.early(shape, "places", marks=False)
    sizes, count_experts = announce.announcing(shape, "sizes"), routing.experts_of_ids(shape)
    announce_experts, all_small = announce.experts(shape), mailbox.all_small(ranks, shape.lamport, announced=True)
    may_end = announce.closing(shape, wait.ROWS_DISPATCH, "header")
    await_sizes = announce.awaiting(shape, wait.ROWS_DISPATCH, "sizes", acquires=False)
    number_tokens, record_numbers = send.numbering(shape, routing.mask_by_thread(shape))
    row_of = device_fn(lambda numbers, token, lane: i32(numbers[token * ranks + lane]) if lane < ranks else i32(-1))
    record, tokens_of_block = handle.recording(shape), layout.sharing(shape).of_block
    rows = send.make(shape, _tokens(shape, row_of), _into(shape, row_of))
    numbered, num_experts = layout.counter(shape), shape.num_experts
    n_numbers = ranks * max(shape.lamport, 1)

    @device_fn
    def lead(call, announced, scratch, words):
        """The leader block announces counts by rank and by expert, records those of all ranks, and ends the call."""
        if calls.is_notify_warp():
            sizes.announce_totals(call, scratch.totals, words)
        count_experts(call.params, call.params[p.ids], i32(0), i32(call.num_tokens), scratch.experts)
        syncthreads()                           # the counts of all warps
        announce_experts(call, scratch.experts, 0)
        if not may_end(call, announced):
            return u64(calls.OVER)
        mark(call.params, stamps.COUNTED)
        if not all_small(announced):
            syncthreads()                       # all warps have read `announced`, which step 4 writes again
            return call.epoch
        ok = record(call, announced, True, scratch.experts)
        mark(call.params, stamps.PLACED)
        if ok:
            end_call(call)
        mark(call.params, stamps.LEFT)
        return u64(calls.OVER)

    @device_fn
    def send_and_receive(call, announced, numbers, prepared):
        """The other blocks: some send at once, the others store arriving rows as soon as they know all counts."""
        rows.send(call, numbers, prepared)
        mark(call.params, stamps.SENT)
        record_numbers(call, numbers, tokens_of_block(call.num_tokens))     # its share; each block has all numbers
        if not await_sizes(call, announced):        # not for places, which come later and which only step 4 reads
            return u64(calls.OVER)
        if not all_small(announced):
            rows.erase(call, numbers, prepared)
            syncthreads()                       # all warps have read `announced`, which step 4 writes again
            numbered.signal(call)
            return call.epoch
        mark(call.params, stamps.COUNTED)
        rows.receive(call, numbers, announced, prepared)
        mark(call.params, stamps.COPIED)
        mark(call.params, stamps.LEFT)
        return u64(calls.OVER)

    @device_fn
    def dispatch(call, at_entry, announced, scratch):
        numbers, words = shared_array(n_numbers, int32), (u64(0), u64(0), i32(0), i32(0))
        if calls.is_fence_warp():
            announce_places(call)
        if calls.is_notify_warp():
            words = sizes.load(call, i32(0))
        if calls.is_leader():
            clear(num_experts, scratch.experts)
        prepared = rows.prepare(call)
        number_tokens(ranks, call, call.params[p.ids], numbers, scratch.totals)
        call = calls.share_epoch(call, at_entry)    # and all numbers
        if calls.is_over(call):
            return u64(calls.OVER)
        mark(call.params, stamps.CLAIMED)
        calls.signal_begun(call)
        if calls.is_leader():
            return lead(call, announced, scratch, words)
        return send_and_receive(call, announced, numbers, prepared)

    return dispatch


def resending(shape, mark):
    """`small` for announce.beginning in a cached dispatch."""
    row_of_token = layout.row_of(shape.n_ranks)
    rows = send.make(shape, _tokens(shape, row_of_token), _into(shape, row_of_token))

    @device_fn
    def send_and_receive(call, announced, prepared):
        rows.send(call, call.params[p.row_of], prepared)
        mark(call.params, stamps.SENT)
        rows.receive(call, call.params[p.row_of], announced, prepared)

    return lamport.call_with_handle(shape, wait.ROWS_DISPATCH, mark, rows.prepare, send_and_receive)
