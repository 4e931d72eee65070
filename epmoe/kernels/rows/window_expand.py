"""Expands small batches by expert: from windows, or from this rank's own memory, to the rows of their experts
(expert_places.py).
"""

from types import SimpleNamespace

from epmoe.device import ballot, device_fn, i32, lane_id, store_i32, u32, u64

from . import control, expand, peers, senders, window_fp8, windows
from .row_copy import BATCH, VECTOR, copy_to_lanes, parts
from .window_rows import n_parts_of, part_of_row, warps_of_rank


def make(shape, block, into, places, receive_probs):
    """Device functions for one kernel, of all blocks but the leader block. known: of expert_places.py, which made `places`.

    into: the kernel's Windows; receive_probs: of window_probs.py. keep(params, epoch, num_tokens, my_rank, x, known):
    this warp's share of the rows that this rank sends to itself. clear(params, known): of zeros in rows without a
    token. receive(params, epoch, my_rank, notes, known): of what the others send; whether it came.
    """
    ranks, local, n_parts, row_bytes = shape.n_ranks, shape.n_local_experts, n_parts_of(shape), shape.row_bytes
    encodes, has_probs, n_vectors = shape.encode, shape.has_probs, senders.vectors_of(shape)
    out_bytes, n_scales, n_notes = n_vectors * VECTOR, shape.scale_words, control.experts_at(ranks)
    rows_at, await_flag, most_tokens = into.at[windows.X], into.await_flag, peers.most_tokens(ranks)
    part_of, (_, part_span), clear_row = part_of_row(shape), parts(n_vectors), expand.clear_row_of(shape, block)
    load_batch, store_batch, _ = copy_to_lanes(read_only=False)
    target, comes, number = places.target, places.comes, places.number
    if encodes:
        send_scales = window_fp8.scale_sender(shape)
    p_out, p_scales, p_rows = block.index("out"), block.index("out_scales"), block.index("n_rows")
    p_known = block.index("expert_row")

    @device_fn
    def expand_part(params, src, known, source, token, part, limit, lane):
        """A part of a row, at this address, to the rows of its experts; with the first, these are written down."""
        out, scales, row = params[p_out], u64(0), u64(0)
        (base, end), is_first = part_span(part, n_parts), True
        if n_scales > 0 and encodes:
            scales = params[p_scales]
        if part == 0:
            row = u64(number(known, source, token, lane)) * u64(local)
            row = u64(params[p_known] + u64(4) * row)
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
        lane, (unit, warps), limit = i32(lane_id()), warps_of_rank(), i32(params[p_rows])
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
        lane, (me, warps), limit = i32(lane_id()), warps_of_rank(), i32(params[p_rows])
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
        lane, (me, warps), limit = i32(lane_id()), warps_of_rank(), i32(params[p_rows])
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

    return SimpleNamespace(keep=keep, clear=clear, receive=receive)
