"""Dispatch of small batches by expert: rows are sent before any rank has announced anything, and every block places
them itself.

Each rank tells all others which of its tokens go to which expert (expert_bits.py), and its rows go into windows at
their ranks (window_rows.py). Every block computes their places from the bits (expert_places.py) and stores them there
(window_expand.py). So between the ids and an expert's row there is one transfer of the row and, at the same time, one
of these words. No block waits for the leader block, which numbers rows for the handle and writes the numbers for the
host. If a rank has many tokens, it says where peers must write; then all ranks use the ordinary way, as if nothing had
been sent. No rank ends the call before all ranks have announced themselves.
"""

from epmoe.device import (ballot, block_dim, device_fn, i32, lane_id, n_warps, popc, store_i32,
                          syncthreads, thread_idx, u32, u64, warp_id)

from .. import stamps
from . import (exchange, expert_bits, expert_places, map_bits, peers, roles, waits,
               window_expand, window_probs, window_rows, windows)
from .routing import or_of_warp
from .status import ROWS_DISPATCH


def _numbers(shape, block):
    """Device functions (look, number) over the tokens of this rank, of the leader block; masks: of their ranks, shared.

    look(routing_map, num_tokens, masks). number(params, num_tokens, masks, totals, writes): behind a barrier, rows for
    rank r in totals[r]; if it writes, the handle's row_of.
    """
    ranks, p_rows = shape.n_ranks, block.index("row_of")
    look_at_ranks = map_bits.ranks_of_token(shape)

    @device_fn
    def look(routing_map, num_tokens, masks):
        token = i32(warp_id())
        while token < num_tokens:
            mask = u32(or_of_warp(look_at_ranks(routing_map, token, i32(lane_id()))))
            if lane_id() == 0:
                masks[token] = i32(mask)
            token = i32(token + n_warps())

    @device_fn
    def number(params, num_tokens, masks, totals, writes):
        lane, rank, rows = i32(lane_id()), i32(warp_id()), params[p_rows]
        while rank < ranks:
            total, first = i32(0), i32(0)
            while first < num_tokens:
                token, bit, row = i32(first + lane), u32(0), i32(-1)
                if token < num_tokens:
                    bit = u32(u32(u32(masks[token]) >> u32(rank)) & u32(1))
                go = u32(ballot(bit != u32(0)))
                if bit != u32(0):
                    row = i32(total + popc(u32(go & u32(u32(u32(1) << u32(lane)) - u32(1)))))
                if writes and token < num_tokens:
                    store_i32(rows + u64(4) * u64(token * ranks + rank), row)
                total, first = i32(total + popc(go)), i32(first + 32)
            if lane == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())

    return look, number


def dispatching(shape, block, of_block, meeting, record_few, mark, mark_own):
    """Device function (params, num_tokens, my_rank, words, ids, x, begun, notes, scratch) -> whether the call is over.

    Of every block, where this rank has few tokens; what it is given is as in rows_dispatch; ids: the routing map.
    """
    if not shape.few:
        return _never
    ranks, epoch_now, goes_on, say_begun = shape.n_ranks, of_block.epoch_now, of_block.goes_on, of_block.say_begun
    end, all_have_few, has_room = of_block.end, peers.all_few(shape, shape.few, told=True), peers.room(ranks)
    (look_tokens, tell_tokens), (look_counts, tell_counts) = meeting.announce_tokens, meeting.announce_counts
    await_tokens, may_end = meeting.await_tokens, exchange.closing(of_block, meeting.await_notes, ROWS_DISPATCH)
    herald_places = exchange.heralding(epoch_now, meeting.announce_places, stamps.by_caller(block, False))
    bits = expert_bits.make(shape, block, ROWS_DISPATCH)
    n_told, tell, await_bits, (look, number) = bits.n_told, bits.tell, bits.await_bits, _numbers(shape, block)
    places, into = expert_places.make(shape, block), windows.make(shape, block, ROWS_DISPATCH, waits.see_flag)
    allocate, count, place, total_rows = places.allocate, places.count, places.place, places.total
    send_probs, receive_probs = window_probs.make(shape, block, bits, places)
    sending = window_rows.make(shape, block, into, send_probs)
    prepare, send, raise_flags = sending.prepare, sending.send, sending.raise_flags
    receiving = window_expand.make(shape, block, into, places, receive_probs)
    keep, clear, receive = receiving.keep, receiving.clear, receiving.receive
    p_capacity, trace = block.index("capacity"), shape.trace

    @device_fn
    def herald(params, words, num_tokens, my_rank):
        looked, now = look_tokens(params, num_tokens, my_rank, i32(0)), epoch_now(words)
        if now != u64(0):
            tell_tokens(params, now, num_tokens, my_rank, i32(0), looked)

    @device_fn
    def of_clerk(params, num_tokens, my_rank, words, ids, begun, notes, scratch, known):
        masks, totals = scratch[3], scratch[2]
        if roles.is_keeper():
            herald_places(params, words, num_tokens, my_rank, u64(0))
        if roles.is_herald():
            herald(params, words, num_tokens, my_rank)
        look(ids, num_tokens, masks)
        epoch = goes_on(begun)                  # and the masks of all warps
        if epoch == u64(0):
            return True
        mark(params, stamps.CLAIMED)
        number(params, num_tokens, masks, totals, False)
        syncthreads()
        if roles.is_herald():
            counts = i32(totals[min(lane_id(), ranks - 1)])
            tell_counts(params, epoch, num_tokens, my_rank, counts, look_counts(params, num_tokens, my_rank, i32(0)))
            if lane_id() == 0:
                mark_own(params, stamps.ANNOUNCED)
        if not await_tokens(params, epoch, my_rank, notes):
            return True
        mark(params, stamps.COUNTED)
        if not all_have_few(notes):
            return False
        if thread_idx() == block_dim() - 1:
            say_begun(params)
        number(params, num_tokens, masks, totals, True)
        if not await_bits(params, epoch, my_rank, notes, known[0]):
            return True
        count(known, notes, scratch[1])
        syncthreads()                           # nobody looks at notes while they are awaited
        if not may_end(params, epoch, my_rank, notes):
            return True
        record_few(params, notes, has_room(notes), scratch[1], known[5])
        mark(params, stamps.PLACED)
        end(params, epoch, my_rank)
        mark(params, stamps.LEFT)
        return True

    @device_fn
    def of_others(params, num_tokens, my_rank, words, ids, x, begun, notes, known):
        prepared, (me, warps) = prepare(num_tokens, x, ids), window_rows.warps_of_rank()
        if warps - 1 - me < n_told(num_tokens):
            now = epoch_now(words)
            if now != u64(0):
                tell(params, now, num_tokens, my_rank, ids, i32(warps - 1 - me), warps)
        epoch = goes_on(begun)
        if epoch == u64(0):
            return True
        mark(params, stamps.CLAIMED)
        send(params, epoch, num_tokens, my_rank, x, ids, prepared)
        mark(params, stamps.SENT)
        if not await_tokens(params, epoch, my_rank, notes):
            return True
        mark(params, stamps.COUNTED)
        if not all_have_few(notes):
            return False
        if not await_bits(params, epoch, my_rank, notes, known[0]):
            return True
        place(params, notes, known)
        mark(params, stamps.PLACED)
        if thread_idx() == block_dim() - 1:
            say_begun(params)
        raise_flags(params, epoch, num_tokens, my_rank)     # behind the barriers of these
        if total_rows(known, i32(lane_id())) <= i32(params[p_capacity]):
            keep(params, epoch, num_tokens, my_rank, x, known)
            mark(params, stamps.ARRIVED)
            clear(params, known)
            receive(params, epoch, my_rank, notes, known)
        if trace:
            syncthreads()
        mark(params, stamps.COPIED)
        mark(params, stamps.LEFT)
        return True

    @device_fn
    def dispatch(params, num_tokens, my_rank, words, ids, x, begun, notes, scratch):
        known = allocate()
        if roles.is_clerk():
            return of_clerk(params, num_tokens, my_rank, words, ids, begun, notes, scratch, known)
        return of_others(params, num_tokens, my_rank, words, ids, x, begun, notes, known)

    return dispatch


@device_fn
def _never(params, num_tokens, my_rank, words, ids, x, begun, notes, scratch):
    return False
