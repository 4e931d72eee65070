"""Windows: memory at every rank into which the others may push small numbers of rows before it has announced anything.

A rank has two windows for each src_rank, used in turn. Call e writes those of its parity without asking. A rank that
has ended call e - 1 has seen that every rank had begun it, and no rank begins it before its launch of e - 2 has ended,
and with it all reading of e - 2's rows. Flags in the control memory show what has arrived; epochs only grow, so flags
are never lowered. For small batches this removes the round trip of the notes before the rows.
"""

from epmoe.device import (any_lane, device_fn, f32, i32, load_u32, st_relaxed_sys_u32, store16, store_f32, store_u32,
                          syncwarp, u32, u64, warp_broadcast_u64)

from ...formats import blockwise_fp8
from ...formats.row_encoder import encode_parts, encode_row
from .. import mailbox, wait
from ..bits import but_lowest, lowest
from ..copy import FLAG_BYTES, rotated
from ..mailbox import MOST_PARTS
from ..send import A_SCALE, STEP
from ..shape import memory_of, namespace, p
from ..wait import FOR_WINDOW, ROWS_DISPATCH


def bytes_for(shape):
    """Bytes of all windows of one parity for an expert-major dispatch."""
    return shape.n_ranks * shape.tuning.window_tokens * shape.row_bytes


def make(shape):
    """Device functions: namespace. rows(call, rank, src_rank): address of the window that a rank has for a src_rank.

    raise_flag(call, rank, row, part): of this rank's window there, behind a fence of the same thread. await_flag(call,
    src_rank, row, part): each lane waits for the flag of its own src_rank and row, those with row < 0 for none;
    whether all came.
    """
    ranks, rows, memory = shape.n_ranks, shape.tuning.window_tokens, memory_of(shape.n_ranks)
    what, flags_at, of_source = (ROWS_DISPATCH, FOR_WINDOW), mailbox.window_flags_at(ranks), rows * shape.row_bytes

    @device_fn
    def rows_at(call, rank, src_rank):
        half = u64((u64(call.epoch) & u64(1)) * call.params[p.window_bytes])
        return u64(memory.pool(call.params, rank) + call.params[p.windows_at] + half + u64(src_rank) * u64(of_source))

    @device_fn
    def flag_at(call, rank, src_rank, row, part):
        index = u64(((u64(call.epoch) & u64(1)) * u64(ranks) + u64(src_rank)) * u64(rows) + u64(row))
        base = u64(memory.control(call.params, rank) + u64(flags_at))
        return u64(base + u64(FLAG_BYTES) * (index * u64(MOST_PARTS) + u64(part)))

    @device_fn
    def raise_flag(call, rank, row, part):
        st_relaxed_sys_u32(flag_at(call, rank, call.my_rank, row, part), u32(call.epoch))

    @device_fn
    def await_flag(call, src_rank, row, part):
        ok = True
        if row >= 0:
            at = flag_at(call, call.my_rank, src_rank, row, part)
            ok = wait.see_flag(call.params, at, u32(call.epoch), what, src_rank)
        failed = any_lane(not ok)
        syncwarp()                              # what one lane acquired, all lanes read
        return failed == 0

    return namespace("windows", rows=rows_at, raise_flag=raise_flag, await_flag=await_flag)


def encoding(shape):
    """Device function (src, to, mask, start, first, end, lane): a warp makes vectors [first, end) of an encoded row.

    Whole steps of the encoder. They go, with their scales, from registers to the rows at `to` of each lane in `mask`,
    beginning with lane `start`.
    """
    value_bytes, quantised = shape.value_bytes, blockwise_fp8.quantised

    @device_fn
    def put(rows, chunk, there, ab, absmax, input_scale, lane):
        (scale, codes), (to, left, start) = quantised(ab[0], ab[1], absmax), rows
        while left != u32(0):
            at = u64(warp_broadcast_u64(to, i32((lowest(left) + start) & 31)))
            if there:
                store16(at + u64(16 * chunk), codes[0], codes[1], codes[2], codes[3])
                if lane & (A_SCALE - 1) == 0:
                    store_f32(at + u64(value_bytes) + u64(4 * i32(chunk >> 3)), scale)
            left = but_lowest(left)

    @device_fn
    def no_rest(rows, lane):
        return

    encode_part = encode_row(value_bytes, blockwise_fp8.GROUP, put, no_rest)
    n_steps = encode_parts(value_bytes)

    @device_fn
    def encode(src, to, mask, start, first, end, lane):
        rows, step = (to, rotated(mask, start), start), i32(first // STEP)
        while mask != u32(0) and STEP * step < end:
            encode_part(src, rows, f32(1), step, n_steps, lane)
            step = i32(step + 1)

    return encode


def sending_scales(shape):
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
                there = u64(warp_broadcast_u64(to, lowest(left)))
                if i < behind:
                    store_u32(there + at, scale)
                left = but_lowest(left)
            base = i32(base + 32)

    return send_scales
