"""Dispatch of small batches by expert: rows are sent before any rank has announced anything, and every block places
them itself.

Each rank tells all others which of its tokens go to which expert, and its rows go into windows at their ranks
(places.py). Every block computes their places from the bits (places.py) and stores them there. So between the ids and
an expert's row there is one transfer of the row and, at the same time, one of these words. No block waits for what the
leader block does besides: it numbers rows for the handle and writes the numbers for the host. It also says where peers
must write. If a rank has many tokens, all ranks use the ordinary way, as if nothing had been sent. No rank ends the
call before all ranks have announced themselves.

A token has its own place in a window, so no rank needs the number of other tokens. A rank's rows for itself are not
moved, or, if encoded, are in its own window. Probs go in words that name the call, one for each token and expert; rows
with a flag for each part.
"""

from epmoe.device import (SIM, any_lane, ballot, block_idx, device_fn, fence_acq_rel_sys, grid_dim, i32, int32, lane_id,
                          ld_relaxed_sys_u64, load_u8, load_u32, n_warps, prefetch, shared_array, st_relaxed_sys_u64,
                          store_i32, store_u32, syncthreads, u32, u64, warp_id)

from ... import stamps
from .. import announce, expand, handle, mailbox, routing, wait
from .. import call as calls
from ..bits import around, or_of_warp, split, warps_of_rank
from ..call import LINE, Call, is_fence_warp, is_last_thread, is_leader, is_notify_warp
from ..copy import BATCH, copying, parts
from ..mailbox import MOST_PARTS
from ..send import encoding, sending_scales
from ..shape import BLOCK, VECTOR, namespace, p
from ..wait import FOR_WINDOW, ROWS_DISPATCH
from . import places
from .row_numbers import numbering


def _parts_of_row(shape):
    """Parts of a row, each with a flag of its own."""
    return min(MOST_PARTS, max(1, -(-shape.src_bytes // (VECTOR * BATCH))))


def _probs(shape, bits, placing):
    """Device functions of a token's probs for the experts of one rank, by a warp: namespace. bits, placing: of places.py

    send(call, token, rank, lane). receive(call, table, src_rank, token, lane): to the token's output rows; whether they
    came. A rank's own are where they are. table: Places.
    """
    n_local, n_experts, what = shape.n_local_experts, shape.n_experts, (ROWS_DISPATCH, FOR_WINDOW)

    @device_fn
    def routed(row, expert):
        value = i32(0)
        if expert < n_local:
            value = i32(load_u8(row + u64(expert)))
        return value

    @device_fn
    def prob_of(probs, expert, is_routed):
        prob = u32(0)
        if is_routed != 0:
            prob = u32(load_u32(probs + u64(4) * u64(expert)))
        return prob

    @device_fn
    def put(to, epoch, expert, is_routed, prob):
        if is_routed != 0:
            st_relaxed_sys_u64(to + u64(8) * u64(expert), wait.tagged(epoch, prob))

    @device_fn
    def send(call, token, rank, lane):
        first = u64(u64(token) * u64(n_experts) + u64(i32(rank * n_local)))
        row, probs = call.params[p.ids] + first, call.params[p.probs] + u64(4) * first
        to, expert = u64(bits.prob_at(call, rank, call.my_rank, token, i32(0))), i32(lane)
        while expert - lane < n_local:            # four windows of experts in flight
            a, b = routed(row, expert), routed(row, i32(expert + 32))
            c, d = routed(row, i32(expert + 64)), routed(row, i32(expert + 96))
            q, r = prob_of(probs, expert, a), prob_of(probs, i32(expert + 32), b)
            s, t = prob_of(probs, i32(expert + 64), c), prob_of(probs, i32(expert + 96), d)
            put(to, call.epoch, expert, a, q)
            put(to, call.epoch, i32(expert + 32), b, r)
            put(to, call.epoch, i32(expert + 64), c, s)
            put(to, call.epoch, i32(expert + 96), d, t)
            expert = i32(expert + 128)

    @device_fn
    def take(call, src_rank, token, expert):
        """(whether it arrived, the prob)"""
        ok, prob = True, u32(0)
        if src_rank == call.my_rank:
            at = u64(u64(token) * u64(n_experts) + u64(i32(call.my_rank * n_local + expert)))
            prob = u32(load_u32(call.params[p.probs] + u64(4) * at))
        else:
            at = u64(bits.prob_at(call, call.my_rank, src_rank, token, expert))
            word = u64(wait.for_tagged_word(call.params, at, u64(ld_relaxed_sys_u64(at)), call.epoch, what, src_rank))
            ok, prob = word != u64(0), u32(word)
        return ok, prob

    @device_fn
    def receive(call, table, src_rank, token, lane):
        ok, expert = True, i32(lane)
        while expert < n_local:
            row = i32(placing.target(table, src_rank, token, expert, i32(call.params[p.n_rows])))
            if ok and row >= 0:
                ok, prob = take(call, src_rank, token, expert)
                store_u32(call.params[p.out_probs] + u64(4) * u64(row), prob)
            expert = i32(expert + 32)
        return any_lane(not ok) == 0

    return namespace("probs", send=send, receive=receive)


def _sending(shape, into, probs):
    """Device functions of all blocks but the leader block: namespace. into: places.windows(); probs: _probs().

    prepare(call) -> (mask of ranks, batch) of what a warp sends first, on its way. send(call, first): this warp's share
    of this rank's tokens. raise_flags(call): behind that and a barrier; one warp says it for all of its block.
    """
    ranks, n_parts, row_bytes, src_bytes = shape.n_ranks, _parts_of_row(shape), shape.row_bytes, shape.src_bytes
    encodes, has_probs, a_vector = shape.encode, shape.has_probs, src_bytes // shape.n_vectors
    spans, look_at_ranks, rows = parts(shape.n_vectors), routing.ranks_of_token(shape), copying(read_only=True)
    if encodes:
        encode = encoding(shape)

    @device_fn
    def prepare(call):
        lane, (unit, _), none, mask = i32(lane_id()), warps_of_rank(), (u32(0), u32(0), u32(0), u32(0)), u32(0)
        batch = none, none, none, none
        if unit < call.num_tokens * n_parts:
            token, part = split(unit, n_parts)
            (a, b), row = spans.span(part, n_parts), call.params[p.x] + u64(token) * u64(src_bytes)
            mask = u32(look_at_ranks(call.params[p.ids], token, lane))
            if encodes:
                at = i32(a_vector * a + LINE * lane)
                while at < a_vector * b:
                    prefetch(row + u64(at))
                    at = i32(at + 32 * LINE)
            elif a < b:
                batch = rows.load(row, a, b, lane)
        return mask, batch

    @device_fn
    def send(call, first):
        lane, (unit, warps), is_first, windows_at = i32(lane_id()), warps_of_rank(), True, u64(0)
        seen, batch = first
        start, units, me = i32((call.my_rank + 1) & 31), i32(call.num_tokens * n_parts), u32(u32(1) << u32(call.my_rank))
        if lane < ranks and unit < units:
            windows_at = u64(into.rows(call, lane, call.my_rank))
        while unit < units:
            token, part = split(unit, n_parts)
            if not is_first:
                seen = u32(look_at_ranks(call.params[p.ids], token, lane))
            mask = u32(or_of_warp(seen))
            (a, b), to = spans.span(part, n_parts), windows_at + u64(token) * u64(row_bytes)
            src = call.params[p.x] + u64(token) * u64(src_bytes)
            if encodes:
                encode(src, to, mask, start, a, b, lane)
            else:
                if is_first:
                    rows.store(batch, to, u32(mask & ~me), start, a, b, lane)
                    a = i32(min(i32(a + BATCH), b))
                rows.copy(src, to, u32(mask & ~me), start, a, b, lane)
            unit, is_first = i32(unit + warps), False
        if has_probs:
            unit = i32(unit - units)
            while unit < call.num_tokens * (ranks - 1):
                token, step = split(unit, max(ranks - 1, 1))
                probs.send(call, token, around(i32(call.my_rank + 1 + step), ranks), lane)
                unit = i32(unit + warps)

    @device_fn
    def raise_flags(call):
        blocks, units = i32(grid_dim() - 1), i32(call.num_tokens * n_parts)
        if warp_id() == n_warps() // 2 and block_idx() < units:    # whose own share is small, if it has any
            fence_acq_rel_sys()
            unit = i32(lane_id() * blocks + block_idx())
            while unit < units:
                (token, part), step = split(unit, n_parts), i32(1)
                while step < ranks:             # also for ranks without the token, which never read it
                    into.raise_flag(call, around(i32(call.my_rank + step), ranks), token, part)
                    step = i32(step + 1)
                unit = i32(unit + 32 * blocks)

    return namespace("sending", prepare=prepare, send=send, raise_flags=raise_flags)


def _receiving(shape, into, placing, probs):
    """Device functions of all blocks but the leader block, each for this warp's share: namespace. table: Places.

    keep(call, table): of the rows that this rank sends to itself. clear(params, table): of zeros in rows without a
    token. receive(call, notes, table): of what the others send; whether it came.
    """
    ranks, n_local, n_parts, row_bytes = shape.n_ranks, shape.n_local_experts, _parts_of_row(shape), shape.row_bytes
    encodes, has_probs, mail = shape.encode, shape.has_probs, mailbox.reading(shape.n_ranks)
    out_bytes, n_scales = shape.n_vectors * VECTOR, shape.scale_words
    spans, clear_row, rows = parts(shape.n_vectors), expand.clear_row_of(shape), copying(read_only=False)
    if encodes:
        send_scales = sending_scales(shape)

    @device_fn
    def expand_part(params, src, table, token_of, part, lane):
        """A part of a row, at src, to the rows of its experts; with the first, these are written down.

        token_of: (src_rank, token).
        """
        (src_rank, token), (base, end), is_first, row = token_of, spans.span(part, n_parts), True, u64(0)
        if part == 0:
            row = u64(placing.number(table, src_rank, token, lane)) * u64(n_local)
            row = u64(params[p.expert_row] + u64(4) * row)
        while base < end:
            batch, window = rows.load(src, base, end, lane), i32(0)
            while window < n_local:
                expert = i32(window + lane)
                to = i32(placing.target(table, src_rank, token, expert, i32(params[p.n_rows])))
                mask = u32(ballot(to >= 0))
                rows.store(batch, params[p.out] + u64(to) * u64(out_bytes), mask, i32(0), base, end, lane)
                if is_first and part == 0 and expert < n_local:
                    store_i32(row + u64(4) * u64(expert), to)
                if is_first and encodes:
                    scales = params[p.out_scales] + u64(4 * n_scales) * u64(to)
                    send_scales(src + u64(out_bytes), base, end, scales, mask, lane)
                window = i32(window + 32)
            base, is_first = i32(base + BATCH), False

    @device_fn
    def keep(call, table):
        lane, (unit, warps), own = i32(lane_id()), warps_of_rank(), call.params[p.x]
        if encodes:
            own = u64(into.rows(call, call.my_rank, call.my_rank))
        while unit < call.num_tokens * n_parts:
            token, part = split(unit, n_parts)
            if placing.comes(table, call.my_rank, token):
                src = own + u64(token) * u64(row_bytes)
                expand_part(call.params, src, table, (call.my_rank, token), part, lane)
            unit = i32(unit + warps)

    @device_fn
    def clear(params, table):
        lane, (me, warps), limit = i32(lane_id()), warps_of_rank(), i32(params[p.n_rows])
        expert = i32(warps - 1 - me)
        while expert < n_local:
            row, end = i32(table.starts[expert] + table.counts[expert]), i32(min(i32(table.starts[expert + 1]), limit))
            while row < end:
                clear_row(params, row, lane)
                row = i32(row + 1)
            expert = i32(expert + warps)
        row = i32(table.starts[n_local] + warps - 1 - me)
        while row < limit:
            clear_row(params, row, lane)
            row = i32(row + warps)

    @device_fn
    def receive(call, notes, table):
        lane, (me, warps), ok, most = i32(lane_id()), warps_of_rank(), True, mail.most_tokens(notes)
        unit, units = i32(warps - 1 - me), i32(most * (ranks - 1) * n_parts)
        while ok and unit < units:              # those of all ranks are expected to come side by side
            turn, part = split(unit, n_parts)
            token, step = split(turn, max(ranks - 1, 1))
            src_rank = around(i32(call.my_rank + 1 + step), ranks)
            if token < mail.tokens(notes, src_rank) and placing.comes(table, src_rank, token):
                awaited = i32(-1)
                if lane == 0:
                    awaited = i32(token)
                ok = into.await_flag(call, src_rank, awaited, part)
                if ok:
                    src = u64(into.rows(call, call.my_rank, src_rank) + u64(token) * u64(row_bytes))
                    expand_part(call.params, src, table, (src_rank, token), part, lane)
            unit = i32(unit + warps)
        if has_probs:
            unit = i32(unit - units)
            while ok and unit < most * ranks:
                token, src_rank = split(unit, ranks)
                if token < mail.tokens(notes, src_rank):
                    ok = probs.receive(call, table, src_rank, token, lane)
                unit = i32(unit + warps)
        return ok

    return namespace("receiving", keep=keep, clear=clear, receive=receive)


def dispatching(shape, mark, number_rows):
    """Device functions: namespace. fits(num_tokens): whether this rank has few tokens.

    dispatch(call, begun, notes, scratch): of every block -> 0 if the call is over; else its number: some rank has many
    tokens, all ranks go on in the ordinary way, and this rank's rows are numbered and announced. number_rows: of
    dispatch.py, for that.
    """
    ranks, few, trace, mail, (_, end_call) = (shape.n_ranks, shape.few, shape.trace, mailbox.reading(shape.n_ranks),
                                     calls.begin_and_end(shape.n_ranks))
    all_few = mailbox.all_few(ranks, few, announced=True)
    announce_places = announce.early(shape, "places", marks=False)
    announce_tokens = announce.early(shape, "tokens", fences=False, marks=False)
    note_counts = announce.telling(shape, *announce.parts_of_note(ranks)["counts"])
    await_tokens = announce.awaiting(shape, ROWS_DISPATCH, "tokens", acquires=False)
    may_end, mark_own = announce.closing(shape, ROWS_DISPATCH, "note"), stamps.by_caller(BLOCK, trace)
    look_at_ranks, write, most = routing.ranks_of_token(shape), handle.writing(shape), max(few, 1)
    number_tokens, record_numbers = numbering(shape, device_fn(lambda masks, token: u32(masks[token])))
    bits, placing, into = places.telling(shape), places.placing(shape), places.windows(shape)
    probs, n_numbers = _probs(shape, bits, placing), ranks * most
    sending, receiving = _sending(shape, into, probs), _receiving(shape, into, placing, probs)

    @device_fn
    def fits(num_tokens):
        return not SIM or num_tokens <= few     # the simulator's ranks share a kernel

    @device_fn
    def look_at_tokens(call, masks):
        """Masks of the ranks of all tokens, by the leader block."""
        token = i32(warp_id())
        while token < call.num_tokens:
            mask = u32(or_of_warp(look_at_ranks(call.params[p.ids], token, i32(lane_id()))))
            if lane_id() == 0:
                masks[token] = i32(mask)
            token = i32(token + n_warps())

    @device_fn
    def announce_counts(call, scratch):
        if is_notify_warp():
            counts = i32(scratch.totals[min(lane_id(), ranks - 1)])
            note_counts.tell(call, counts, note_counts.look(call, i32(0)))
            if lane_id() == 0:
                mark_own(call.params, stamps.ANNOUNCED)

    @device_fn
    def lead(call, begun, notes, scratch, table):
        """The leader block numbers rows for the handle, records counts, and ends the call -> whether it is over."""
        masks, numbers = shared_array(most, int32), shared_array(n_numbers, int32)
        if is_fence_warp():
            announce_places(call)
        if is_notify_warp():
            announce_tokens(call)
        look_at_tokens(call, masks)
        call = Call(call.params, call.num_tokens, call.my_rank, calls.epoch_of(begun))  # and the masks of all warps
        if call.epoch == u64(0):
            return True
        mark(call.params, stamps.CLAIMED)
        number_tokens(call, masks, numbers, scratch.totals)
        syncthreads()
        announce_counts(call, scratch)
        if not await_tokens(call, notes):
            return True
        mark(call.params, stamps.COUNTED)
        if not all_few(notes):
            return False
        if is_last_thread():
            calls.say_begun(call.params)
        record_numbers(call, numbers, (i32(0), i32(call.num_tokens)))
        if not bits.await_bits(call, notes, table.bits):
            return True
        placing.count(table, notes, scratch.experts)
        syncthreads()                           # nobody looks at notes while they are awaited
        if not may_end(call, notes):
            return True
        write.counts(call.params, notes, mail.has_room(notes))
        write.experts(call.params, scratch.experts, table.partial)
        mark(call.params, stamps.PLACED)
        end_call(call)
        mark(call.params, stamps.LEFT)
        return True

    @device_fn
    def tell_bits(call):
        """From the last warp on: the first ones have rows to send."""
        me, warps = warps_of_rank()
        if warps - 1 - me < bits.n_told(call.num_tokens):
            now = calls.epoch_now(call.params)
            if now != u64(0):
                bits.tell(Call(call.params, call.num_tokens, call.my_rank, now), i32(warps - 1 - me), warps)

    @device_fn
    def send_and_receive(call, begun, notes, table):
        """The other blocks -> whether the call is over."""
        first = sending.prepare(call)
        tell_bits(call)
        call = Call(call.params, call.num_tokens, call.my_rank, calls.epoch_of(begun))
        if call.epoch == u64(0):
            return True
        mark(call.params, stamps.CLAIMED)
        sending.send(call, first)
        mark(call.params, stamps.SENT)
        if not await_tokens(call, notes):
            return True
        mark(call.params, stamps.COUNTED)
        if not all_few(notes):
            return False
        if not bits.await_bits(call, notes, table.bits):
            return True
        placing.place(call.params, notes, table)
        mark(call.params, stamps.PLACED)
        if is_last_thread():
            calls.say_begun(call.params)
        sending.raise_flags(call)               # behind the barriers of these
        if placing.total(table, i32(lane_id())) <= i32(call.params[p.capacity]):
            receiving.keep(call, table)
            mark(call.params, stamps.ARRIVED)
            receiving.clear(call.params, table)
            receiving.receive(call, notes, table)
        if trace:
            syncthreads()
        mark(call.params, stamps.COPIED)
        mark(call.params, stamps.LEFT)
        return True

    @device_fn
    def dispatch(call, begun, notes, scratch):
        table = placing.allocate()
        if is_leader():
            is_over = lead(call, begun, notes, scratch, table)
        else:
            is_over = send_and_receive(call, begun, notes, table)
        if is_over:
            return u64(0)
        return number_rows(call, begun, scratch)

    return namespace("few", fits=fits, dispatch=dispatch)
