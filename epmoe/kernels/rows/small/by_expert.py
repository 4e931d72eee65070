"""Dispatch of small batches by expert: sends rows before any rank has announced anything, expands them as they come.

As in dispatch.py, but a row goes to a place of its own token, so no rank needs the numbers of other tokens' rows. Each
rank tells all others, as bits, which of its tokens go to which expert. From these bits every block computes where
experts' rows begin (places.py). So getting from the map to an expert's row takes one transfer of the row and, at the
same time, one of the bits. The leader block meanwhile records rows for handle and host. No other block waits for this.
"""

from epmoe.device import (ballot, device_fn, i32, int32, lane_id, load_u32, load_u8, shared_array, store_i32, store_u32,
                          syncthreads, u32, u64, warp_broadcast_i32, warp_broadcast_u64, warp_or_u32)

from ... import stamps
from ...bits import adding_four, but_lowest, four, has, lowest, warps_of_rank
from ...params import VECTOR, by_warps, word_in
from .. import announce, expand, handle, mailbox, routing, wait
from .. import call as calls
from ..copy import copying
from ..send import A_SCALE
from ..shape import namespace, p
from . import lamport, places, send
from .lamport import put


def _tokens(shape):
    """`tokens` for send.make: token t is row t of the window, with the probs of its experts at each rank."""
    n_local, num_experts, has_probs = shape.num_local_experts, shape.num_experts, shape.has_probs
    at, ranks_of_lane = lamport.addresses(shape), routing.ranks_of_token(shape)

    @device_fn
    def load(params, token, part, lane, is_wanted):
        return u32(ranks_of_lane(params[p.ids], token, lane)) if is_wanted else u32(0)

    row = device_fn(lambda known, token, seen, lane: i32(token) if has(warp_or_u32(seen), lane) else i32(-1))

    @device_fn
    def load_expert(given, expert):
        """(whether the token goes to the expert, its prob). Does not wait for the loads."""
        call, token, _ = given
        i = u64(token) * u64(num_experts) + u64(min(expert, i32(num_experts - 1)))
        return load_u8(call.params[p.ids] + i), load_u32(call.params[p.probs] + u64(4) * i)

    @device_fn
    def put_prob(n, given, expert, seen):
        call, _, to = given
        rank = i32(u32(min(expert, i32(num_experts - 1))) // u32(n_local))
        there = u64(warp_broadcast_u64(to, rank))       # a lane gets the address at its expert's rank
        if expert < num_experts and seen[0] != 0:
            put(at.word(there, i32(expert - rank * n_local)), seen[1], call.epoch)
        return n

    load_four, put_four = four(load_expert), adding_four(put_prob)

    @device_fn
    def send_probs(call, token, seen, mask, to, lane):
        expert, given = i32(lane), (call, token, to)
        while has_probs and expert - lane < num_experts:  # four windows of experts in flight
            put_four(i32(0), given, expert, 32, load_four(given, expert, 32))
            expert = i32(expert + 128)

    return namespace("tokens", load=load, row=row, send=send_probs)


def _into(shape, placing):
    """`into` for send.make: rows, scales and probs go to the rows of their experts. known: Places; placing: of them."""
    ranks, n_local, has_probs, encodes = shape.n_ranks, shape.num_local_experts, shape.has_probs, shape.encode
    out_bytes, n_scales, rows = shape.n_vectors * VECTOR, shape.scale_words, copying(read_only=True)
    mail, at, taking = mailbox.reading(ranks), lamport.addresses(shape), lamport.taking(wait.ROWS_DISPATCH)

    arriving = device_fn(lambda call, announced:
                         (mail.tokens(announced, i32(lane_id())) if lane_id() < ranks else i32(0), i32(0)))

    @device_fn
    def row_of(table, src_rank, src_token):
        return i32(src_token) if placing.comes(table, src_rank, src_token) else i32(-1)

    own_row = device_fn(lambda call, table, src_token, lane: row_of(table, call.my_rank, src_token))

    @device_fn
    def kept(params, row):
        """The output row, -1 if it is dropped: from num_rows on."""
        return i32(row) if row < i32(params[p.num_rows]) else i32(-1)

    @device_fn
    def store(call, table, found, batch, span, scale, lane):
        (src_rank, src_token, _), (a, b), window = found, span, i32(0)
        while window < n_local:
            row = kept(call.params, placing.row(table, src_rank, src_token, i32(window + lane)))
            mask, to = u32(ballot(row >= 0)), call.params[p.out] + u64(row) * u64(out_bytes)
            rows.store(batch, to, mask, i32(0), a, b, lane)
            while encodes and mask != u32(0):
                to_row = i32(warp_broadcast_i32(row, lowest(mask)))
                if lane < (b - a) // A_SCALE:   # the scales of the part
                    store_u32(word_in(call.params[p.out_scales], to_row, n_scales, i32(a // A_SCALE + lane)), scale)
                mask = but_lowest(mask)
            window = i32(window + 32)

    @device_fn
    def find(given, expert):
        """(row for an expert, address of its prob in the window or 0)"""
        table, src_rank, src_token, row_at = given
        row = placing.row(table, src_rank, src_token, expert)
        return row, at.word(row_at, expert) if has_probs and row >= 0 else u64(0)

    @device_fn
    def keep(n, given, expert, came):
        """Stores an expert's row for later calls, and its prob. A dropped row stays dropped later."""
        (params, known_at), row = given, kept(given[0], came[0])
        if expert < n_local:
            store_i32(known_at + u64(4) * u64(expert), row)
        if has_probs and row >= 0:
            store_u32(params[p.out_probs] + u64(4) * u64(row), came[1])
        return n

    find_four, keep_four = four(find), adding_four(keep)

    @device_fn
    def receive(call, table, found, row_at, lane):
        (src_rank, src_token, _), ok, expert = found, True, i32(lane)
        number = placing.number(table, src_rank, src_token, lane)
        known_at = call.params[p.expert_row] + u64(4) * u64(number) * u64(n_local)
        while ok and expert - lane < n_local:
            a, b, c, d = find_four((table, src_rank, src_token, row_at), expert, 32)
            probs = u32(0), u32(0), u32(0), u32(0)
            if has_probs:
                ok, probs = taking.words(call, src_rank, i32(0), (a[1], b[1], c[1], d[1]))
            if ok:
                came = (a[0], probs[0]), (b[0], probs[1]), (c[0], probs[2]), (d[0], probs[3])
                keep_four(i32(0), (call.params, known_at), expert, 32, came)
            expert = i32(expert + 128)
        return ok

    return namespace("into", arriving=arriving, own_row=own_row, row_of=row_of, store=store, receive=receive)


def receiving(shape, mark):
    """Namespace of device functions for the blocks that receive.

    place(call, announced, places) -> rows by expert, -1 if a wait has expired: it waits for all ranks' bits.
    receive(call, announced, places, n_rows, prepared): stores the rows. If `out` has no room for all, they stay in the
    windows. receive_all(call, announced): does both for these, after the call has ended.
    """
    bits, placing = places.announcing(shape), places.placing(shape)
    clear_rows = expand.clearing(shape, device_fn(lambda table, expert: (table.starts[expert], table.counts[expert])))
    rows = send.make(shape, _tokens(shape), _into(shape, placing))

    @device_fn
    def place(call, announced, table):
        if not bits.await_bits(call, announced, table.bits):
            return i32(-1)
        n_rows = placing.place(call.params, announced, table)
        mark(call.params, stamps.PLACED)
        return i32(n_rows)

    @device_fn
    def receive(call, announced, table, n_rows, prepared):
        me, warps = warps_of_rank()
        if 0 <= n_rows <= i32(call.params[p.out_rows]):     # the first warps have most to receive
            clear_rows(call.params, table, i32(warps - 1 - me), warps, i32(lane_id()))
            rows.receive(call, table, announced, prepared)
        mark(call.params, stamps.COPIED)

    @device_fn
    def receive_all(call, announced):
        table = placing.allocate()
        if not calls.is_leader():               # as in the call itself
            receive(call, announced, table, place(call, announced, table), rows.prepare(call))

    return namespace("receiving", bits=bits, placing=placing, rows=rows, place=place, receive=receive,
                     receive_all=receive_all)


def dispatching(shape, mark, number_rows):
    """Device function dispatch(call, at_entry, announced, scratch), as in dispatch.py. number_rows: ../dispatch.py."""
    ranks, (_, end_call) = shape.n_ranks, calls.begin_and_end(shape.n_ranks)
    receiver, all_small = receiving(shape, mark), mailbox.all_small(ranks, shape.lamport, announced=True)
    bits, placing, rows, tell_host = receiver.bits, receiver.placing, receiver.rows, handle.telling_host(shape)
    await_tokens = announce.awaiting(shape, wait.ROWS_DISPATCH, "tokens", acquires=False)
    announce_places = announce.early(shape, "places", marks=False)
    announce_tokens = announce.early(shape, "tokens", fences=False, marks=False)
    ranks_of_lane, most = routing.ranks_of_token(shape), max(shape.lamport, 1)
    may_end, n_numbers = announce.closing(shape, wait.ROWS_DISPATCH, "header"), ranks * most
    number_tokens, record_numbers = send.numbering(shape, device_fn(lambda masks, token: u32(masks[token])))
    counts, write = announce.announcing(shape, "counts"), handle.writing(shape, placing.tokens_for)

    @by_warps
    def store_mask(token, call, masks):
        """The leader block stores the mask of a token's ranks."""
        mask = warp_or_u32(ranks_of_lane(call.params[p.ids], token, i32(lane_id())))
        if lane_id() == 0:
            masks[token] = i32(mask)

    @device_fn
    def lead(call, at_entry, announced, scratch, table):
        """The leader block numbers rows for the handle, records counts, and ends the call -> whether it is over."""
        masks, numbers = shared_array(most, int32), shared_array(n_numbers, int32)
        if calls.is_fence_warp():
            announce_places(call)
        if calls.is_notify_warp():
            announce_tokens(call)
        store_mask(call.num_tokens, call, masks)
        call = calls.share_epoch(call, at_entry)   # and the masks of all warps
        if calls.is_over(call):
            return True
        mark(call.params, stamps.CLAIMED)
        number_tokens(ranks, call, masks, numbers, scratch.totals)
        syncthreads()
        if calls.is_notify_warp():
            counts.announce_totals(call, scratch.totals, counts.load(call, i32(0)))
        if not await_tokens(call, announced):
            return True
        mark(call.params, stamps.COUNTED)
        if not all_small(announced):
            return False
        calls.signal_begun(call)
        record_numbers(call, numbers, (i32(0), i32(call.num_tokens)))
        n_words = placing.words_used(announced)
        if not bits.await_bits(call, announced, table.bits):        # after its barrier nobody reads `announced`
            return True
        write.experts(call.params, (table, n_words), table.partial)
        if not may_end(call, announced):
            return True
        write.counts(call.params, announced, True)
        tell_host(call.params)
        mark(call.params, stamps.PLACED)
        end_call(call)
        mark(call.params, stamps.LEFT)
        return True

    @device_fn
    def send_and_receive(call, at_entry, announced, table):
        """The other blocks send and receive -> whether the call is over."""
        prepared, (me, warps) = rows.prepare(call), warps_of_rank()
        from_last = i32(warps - 1 - me)         # the last warps announce bits; the first have rows to send
        if from_last < bits.n_tasks(call.num_tokens):
            this_call = calls.read_epoch(call)
            if not calls.is_over(this_call):
                bits.announce(this_call, from_last, warps)
        call = calls.share_epoch(call, at_entry)
        if calls.is_over(call):
            return True
        mark(call.params, stamps.CLAIMED)
        rows.send(call, table, prepared)
        mark(call.params, stamps.SENT)
        if not await_tokens(call, announced):
            return True
        mark(call.params, stamps.COUNTED)
        if not all_small(announced):
            rows.erase(call, table, prepared)
            return False
        n_rows = receiver.place(call, announced, table)
        if n_rows < 0:
            return True
        calls.signal_begun(call)
        receiver.receive(call, announced, table, n_rows, prepared)
        mark(call.params, stamps.LEFT)
        return True

    @device_fn
    def dispatch(call, at_entry, announced, scratch):
        table = placing.allocate()
        if calls.is_leader():
            is_over = lead(call, at_entry, announced, scratch, table)
        else:
            is_over = send_and_receive(call, at_entry, announced, table)
        return u64(calls.OVER) if is_over else number_rows(call, at_entry, scratch)

    return dispatch
