"""Few rows by expert: into windows at their ranks before anybody has said anything, and out of them to experts' rows.

A token has its own place in a window, so nobody needs to know how many others there are. What a rank sends to itself
stays where it lies, or, encoded, in its own window. Probs go in words that name the call (expert_bits.py), rows with a
flag for each part.
"""

from types import SimpleNamespace

from epmoe.device import (any_lane, ballot, block_idx, device_fn, f32, fence_acq_rel_sys, ffs, grid_dim, i32, lane_id,
                          ld_relaxed_sys_u64, load_i32, load_u8, load_u32, load_u64, n_warps, prefetch,
                          st_relaxed_sys_u64, store16, store_f32, store_i32, store_u32, u32, u64, warp_broadcast_u64,
                          warp_id)

from ..formats import blockwise_fp8
from ..formats.row_encoder import encode_parts, encode_row
from . import control, expand, expert_bits, peers, senders, waits, windows
from .row_copy import BATCH, VECTOR, copy_to_lanes, parts, rotated
from .status import FOR_WINDOW, ROWS_DISPATCH
from .waits import LINE

STEP, A_SCALE = senders.STEP, senders.A_SCALE


def n_parts_of(shape):
    """Parts of a row, each with a flag of its own."""
    return min(control.MOST_PARTS, max(1, -(-senders.bytes_of(shape) // (VECTOR * BATCH))))


def _scales(shape):
    """Device function (src, first, end, to, mask, lane): a warp; the scales of vectors [first, end) of an encoded row.

    From the address of the first of all its scales to those at `to` of each lane in `mask`.
    """
    n_scales = shape.scale_words

    @device_fn
    def send_scales(src, first, end, to, mask, lane):
        base, behind = i32(first // A_SCALE), i32(min(i32(u32(end + A_SCALE - 1) // u32(A_SCALE)), n_scales))
        while base < behind:
            i, left = i32(base + lane), u32(mask)
            at = u64(4) * u64(min(i, i32(behind - 1)))
            scale = u32(load_u32(src + at))
            while left != u32(0):
                there = u64(warp_broadcast_u64(to, i32(ffs(left) - 1)))
                if i < behind:
                    store_u32(there + at, scale)
                left = u32(left & u32(left - u32(1)))
            base = i32(base + 32)

    return send_scales


def _encode(shape):
    """Device function (src, to, mask, start, first, end, lane): a warp makes vectors [first, end) of an encoded row.

    Whole steps of the encoder. They go, with their scales, from registers to the rows at `to` of each lane in `mask`,
    beginning with lane `start`.
    """
    value_bytes, quantised = shape.value_bytes, blockwise_fp8.quantised

    @device_fn
    def put(rows, chunk, there, a, b, absmax, input_scale, lane):
        (scale, codes), (to, left, start) = quantised(a, b, absmax), rows
        while left != u32(0):
            at = u64(warp_broadcast_u64(to, i32((ffs(left) - 1 + start) & 31)))
            if there:
                store16(at + u64(16 * chunk), codes[0], codes[1], codes[2], codes[3])
                if lane & (A_SCALE - 1) == 0:
                    store_f32(at + u64(value_bytes) + u64(4 * i32(chunk >> 3)), scale)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def no_rest(rows, lane):
        return

    _, encode_part = encode_row(value_bytes, blockwise_fp8.GROUP, put, no_rest)
    n_steps = encode_parts(value_bytes)

    @device_fn
    def encode(src, to, mask, start, first, end, lane):
        rows, step = (to, rotated(mask, start), start), i32(first // STEP)
        while mask != u32(0) and STEP * step < end:
            encode_part(src, rows, f32(1), step, n_steps, lane)
            step = i32(step + 1)

    return encode


def _probs(shape, block, bits):
    """Device functions (send, receive) of a token's probs for the experts of one rank, by a warp.

    send(params, epoch, my_rank, routing_map, token, rank, lane). receive(params, epoch, my_rank, known, source, token,
    limit, lane): to the token's output rows; whether they came. A rank's own are where they are.
    """
    local, n_experts, target, prob_at = shape.n_local_experts, shape.n_experts, bits.target, bits.prob_at
    p_probs, p_out_probs = block.offset("probs"), block.offset("out_probs")
    p_words, p_timeout = block.offset("words"), block.offset("timeout_ns")

    @device_fn
    def routed(row, expert):
        value = i32(0)
        if expert < local:
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
            st_relaxed_sys_u64(to + u64(8) * u64(expert), waits.told(epoch, prob))

    @device_fn
    def send(params, epoch, my_rank, routing_map, token, rank, lane):
        first = u64(u64(token) * u64(n_experts) + u64(i32(rank * local)))
        row, probs = u64(routing_map) + first, u64(load_u64(params + u64(p_probs))) + u64(4) * first
        to, expert = u64(prob_at(params, epoch, rank, my_rank, token, i32(0))), i32(lane)
        while expert - lane < local:            # four windows of experts in flight
            a, b = routed(row, expert), routed(row, i32(expert + 32))
            c, d = routed(row, i32(expert + 64)), routed(row, i32(expert + 96))
            p, q = prob_of(probs, expert, a), prob_of(probs, i32(expert + 32), b)
            r, s = prob_of(probs, i32(expert + 64), c), prob_of(probs, i32(expert + 96), d)
            put(to, epoch, expert, a, p)
            put(to, epoch, i32(expert + 32), b, q)
            put(to, epoch, i32(expert + 64), c, r)
            put(to, epoch, i32(expert + 96), d, s)
            expert = i32(expert + 128)

    @device_fn
    def take(params, epoch, my_rank, source, token, expert):
        """(whether it came, the prob)"""
        ok, prob = True, u32(0)
        if source == my_rank:
            at = u64(u64(token) * u64(n_experts) + u64(i32(my_rank * local + expert)))
            prob = u32(load_u32(u64(load_u64(params + u64(p_probs))) + u64(4) * at))
        else:
            at = u64(prob_at(params, epoch, my_rank, source, token, expert))
            status = u64(u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
            word = u64(waits.wait_for_tagged_word(at, u64(ld_relaxed_sys_u64(at)), epoch, status,
                                                  u64(load_u64(params + u64(p_timeout))), ROWS_DISPATCH, FOR_WINDOW,
                                                  source))
            ok, prob = word != u64(0), u32(word)
        return ok, prob

    @device_fn
    def receive(params, epoch, my_rank, known, source, token, limit, lane):
        ok, expert = True, i32(lane)
        while expert < local:
            row = i32(target(known, source, token, expert, limit))
            if ok and row >= 0:
                ok, prob = take(params, epoch, my_rank, source, token, expert)
                store_u32(u64(load_u64(params + u64(p_out_probs))) + u64(4) * u64(row), prob)
            expert = i32(expert + 32)
        return any_lane(not ok) == 0

    return send, receive


def make(shape, block, bits):
    """Device functions for one kernel, of all blocks but the clerk. known: of expert_bits.py, which `bits` is made by.

    prepare(num_tokens, x, routing_map) -> what a warp sends first, on its way. send(params, epoch, num_tokens, my_rank,
    x, routing_map, prepared): this warp's share of this rank's tokens. raise_flags(params, epoch, num_tokens, my_rank):
    behind that and a barrier; one warp says it for all of its block. keep(params, epoch, num_tokens,
    my_rank, x, known): this warp's share of the rows that this rank sends to itself. clear(params, known): of zeros in
    rows without a token. receive(params, epoch, my_rank, notes, known): of what the others send; whether it came.
    """
    ranks, local, n_parts = shape.n_ranks, shape.n_local_experts, n_parts_of(shape)
    row_bytes, encodes, has_probs = shape.row_bytes, shape.encode, shape.has_probs
    n_vectors, src_bytes = senders.vectors_of(shape), senders.bytes_of(shape)
    out_bytes, n_scales, n_notes = n_vectors * VECTOR, shape.scale_words, control.experts_at(ranks)
    into = windows.make(shape, block, ROWS_DISPATCH, waits.see_flag)
    rows_at, raise_flag, await_flag = into.at[windows.X], into.raise_flag, into.await_flag
    _, part_span = parts(n_vectors)
    load_given, store_given, copy_given = copy_to_lanes(read_only=True)
    load_batch, store_batch, _ = copy_to_lanes(read_only=False)
    look_at_ranks, gather_ranks = expert_bits.ranks_of_token(shape)
    target, comes, number, most_tokens = bits.target, bits.comes, bits.number, peers.most_tokens(ranks)
    (send_probs, receive_probs), clear_row = _probs(shape, block, bits), expand.clear_row_of(shape, block)
    if encodes:
        encode, send_scales = _encode(shape), _scales(shape)
    p_out, p_scales, p_rows = block.offset("out"), block.offset("out_scales"), block.offset("n_rows")
    p_known, a_vector = block.offset("expert_row"), src_bytes // n_vectors

    @device_fn
    def warps_of_rank():
        """(number of this warp among those of all blocks but the clerk, how many these are)"""
        blocks = i32(grid_dim() - 1)
        return i32(warp_id() * blocks + block_idx()), i32(n_warps() * blocks)

    @device_fn
    def part_of(unit):
        token = i32(u32(unit) // u32(n_parts))
        return token, i32(unit - token * n_parts)

    @device_fn
    def prepare(num_tokens, x, routing_map):
        lane, (unit, _), none, mask = i32(lane_id()), warps_of_rank(), u32(0), u32(0)
        batch = (none, none, none, none), (none, none, none, none), (none, none, none, none), (none, none, none, none)
        if unit < num_tokens * n_parts:
            token, part = part_of(unit)
            a, b = part_span(part, n_parts)
            mask = u32(look_at_ranks(routing_map, token, lane))
            if encodes:
                row, at = u64(x) + u64(token) * u64(src_bytes), i32(a_vector * a + LINE * lane)
                while at < a_vector * b:
                    prefetch(row + u64(at))
                    at = i32(at + 32 * LINE)
            elif a < b:
                batch = load_given(u64(x) + u64(token) * u64(src_bytes), a, b, lane)
        return mask, batch

    @device_fn
    def others(mask, my_rank):
        return u32(mask & ~u32(u32(1) << u32(my_rank)))

    @device_fn
    def send(params, epoch, num_tokens, my_rank, x, routing_map, prepared):
        lane, (unit, warps), is_first, rows = i32(lane_id()), warps_of_rank(), True, u64(0)
        seen, batch = prepared
        start, units = i32((my_rank + 1) & 31), i32(num_tokens * n_parts)
        if lane < ranks and unit < units:
            rows = u64(rows_at(params, epoch, lane, my_rank))
        while unit < units:
            token, part = part_of(unit)
            if not is_first:
                seen = u32(look_at_ranks(routing_map, token, lane))
            mask = u32(gather_ranks(seen))
            (a, b), to, theirs = part_span(part, n_parts), rows + u64(token) * u64(row_bytes), others(mask, my_rank)
            if encodes:
                encode(u64(x) + u64(token) * u64(src_bytes), to, mask, start, a, b, lane)
            else:
                if is_first:
                    store_given(batch, to, theirs, start, a, b, lane)
                    a = i32(min(i32(a + BATCH), b))
                copy_given(u64(x) + u64(token) * u64(src_bytes), to, theirs, start, a, b, lane)
            unit, is_first = i32(unit + warps), False
        if has_probs:
            unit = i32(unit - units)
            while unit < num_tokens * (ranks - 1):
                token = i32(u32(unit) // u32(max(ranks - 1, 1)))
                rank = i32(my_rank + 1 + unit - token * (ranks - 1))
                if rank >= ranks:
                    rank = i32(rank - ranks)
                send_probs(params, epoch, my_rank, routing_map, token, rank, lane)
                unit = i32(unit + warps)

    @device_fn
    def raise_flags(params, epoch, num_tokens, my_rank):
        blocks, units = i32(grid_dim() - 1), i32(num_tokens * n_parts)
        if warp_id() == n_warps() // 2 and block_idx() < units:    # whose own share is small, if it has any
            fence_acq_rel_sys()
            unit = i32(lane_id() * blocks + block_idx())
            while unit < units:
                (token, part), peer = part_of(unit), i32(1)
                while peer < ranks:             # also where the token does not go: nobody looks at that
                    rank = i32(my_rank + peer)
                    if rank >= ranks:
                        rank = i32(rank - ranks)
                    raise_flag(params, epoch, rank, my_rank, token, part)
                    peer = i32(peer + 1)
                unit = i32(unit + 32 * blocks)

    @device_fn
    def expand_part(params, src, known, source, token, part, limit, lane):
        """A part of a row, at this address, to the rows of its experts; with the first, these are written down."""
        out, scales, row = u64(load_u64(params + u64(p_out))), u64(0), u64(0)
        (base, end), is_first = part_span(part, n_parts), True
        if n_scales > 0 and encodes:
            scales = u64(load_u64(params + u64(p_scales)))
        if part == 0:
            row = u64(number(known, source, token, lane)) * u64(local)
            row = u64(u64(load_u64(params + u64(p_known))) + u64(4) * row)
        while base < end:
            batch, window = load_batch(src, base, end, lane), i32(0)
            while window < local:
                expert = i32(window + lane)
                to = i32(target(known, source, token, expert, limit))
                mask = u32(ballot(to >= 0))
                store_batch(batch, out + u64(to) * u64(out_bytes), mask, i32(0), base, end, lane)
                if is_first and part == 0 and expert < local:
                    store_i32(row + u64(4) * u64(expert), to)
                if is_first and encodes:
                    send_scales(src + u64(out_bytes), base, end, scales + u64(4 * n_scales) * u64(to), mask, lane)
                window = i32(window + 32)
            base, is_first = i32(base + BATCH), False

    @device_fn
    def keep(params, epoch, num_tokens, my_rank, x, known):
        lane, (unit, warps), limit = i32(lane_id()), warps_of_rank(), i32(load_i32(params + u64(p_rows)))
        rows = u64(x)
        if encodes:
            rows = u64(rows_at(params, epoch, my_rank, my_rank))
        while unit < num_tokens * n_parts:
            token, part = part_of(unit)
            if comes(known, my_rank, token):
                expand_part(params, rows + u64(token) * u64(row_bytes), known, my_rank, token, part, limit, lane)
            unit = i32(unit + warps)

    @device_fn
    def clear(params, known):
        lane, (me, warps), limit = i32(lane_id()), warps_of_rank(), i32(load_i32(params + u64(p_rows)))
        starts, counts = known[2], known[3]
        expert = i32(warps - 1 - me)
        while expert < local:
            row, end = i32(starts[expert] + counts[expert]), i32(min(i32(starts[expert + 1]), limit))
            while row < end:
                clear_row(params, row, lane)
                row = i32(row + 1)
            expert = i32(expert + warps)
        row = i32(starts[local] + warps - 1 - me)
        while row < limit:
            clear_row(params, row, lane)
            row = i32(row + warps)

    @device_fn
    def receive(params, epoch, my_rank, notes, known):
        lane, (me, warps), limit = i32(lane_id()), warps_of_rank(), i32(load_i32(params + u64(p_rows)))
        unit, ok, most = i32(warps - 1 - me), True, most_tokens(notes)
        units, others = i32(most * (ranks - 1) * n_parts), max(ranks - 1, 1)
        while ok and unit < units:              # those of all ranks are expected to come side by side
            turn, part = part_of(unit)
            token = i32(u32(turn) // u32(others))
            source = i32(my_rank + 1 + turn - token * others)
            if source >= ranks:
                source = i32(source - ranks)
            if token < notes[source * n_notes + control.TOKENS] and comes(known, source, token):
                awaited = i32(-1)
                if lane == 0:
                    awaited = i32(token)
                ok = await_flag(params, epoch, my_rank, source, awaited, part)
                if ok:
                    src = u64(rows_at(params, epoch, my_rank, source) + u64(token) * u64(row_bytes))
                    expand_part(params, src, known, source, token, part, limit, lane)
            unit = i32(unit + warps)
        if has_probs:
            unit = i32(unit - units)
            while ok and unit < most * ranks:
                token = i32(u32(unit) // u32(ranks))
                source = i32(unit - token * ranks)
                if token < notes[source * n_notes + control.TOKENS]:
                    ok = receive_probs(params, epoch, my_rank, known, source, token, limit, lane)
                unit = i32(unit + warps)
        return ok

    return SimpleNamespace(prepare=prepare, send=send, raise_flags=raise_flags, keep=keep, clear=clear, receive=receive,
                           warps_of_rank=warps_of_rank)
