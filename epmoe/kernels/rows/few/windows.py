"""Windows: memory at every rank into which the others may push small numbers of rows before it has announced anything.

A rank has two windows for each src_rank, used in turn. Call e writes those of its parity without asking. A rank that
has ended call e - 1 has seen that every rank had begun it, and no rank begins it before its launch of e - 2 has ended,
and with it all reading of e - 2's rows. Flags in the control memory show what has arrived; epochs only grow, so flags
are never lowered. For small batches this removes the round trip of the notes before the rows.

Expert-major combine: all blocks but the leader block push their rows, all at once, and then reduce (combining).
"""

from epmoe.device import (any_lane, block_idx, device_fn, f32, fence_acq_rel_sys, grid_dim, i32, lane_id, load_i32,
                          load_u32, n_warps, red_add_relaxed_gpu_i32, shfl_idx, st_relaxed_sys_u32, store16, store_f32,
                          store_u32, syncthreads, syncthreads_or, syncwarp, u32, u64, warp_broadcast_i32,
                          warp_broadcast_u64, warp_id)

from ... import stamps
from ...formats import blockwise_fp8
from ...formats.row_encoder import encode_parts, encode_row
from .. import announce, mailbox, push, reduce, wait
from .. import call as calls
from ..bits import but_lowest, largest, lowest, of_lane_before, split, warps_of_rank
from ..copy import FLAG_BYTES, parts, rotated
from ..mailbox import MOST_PARTS
from ..send import A_SCALE, STEP
from ..shape import memory_of, namespace, p
from ..wait import FOR_WINDOW, ROWS_COMBINE


def _prob_bytes(shape):
    """Bytes of a row's probs in a window."""
    return 4 * shape.n_meta * shape.has_probs


def bytes_for(shape):
    """Bytes of all windows of one parity for the calls of a kernel; only expert-major ones use them."""
    a_row = shape.row_bytes + _prob_bytes(shape)
    return shape.n_ranks * shape.tuning.window_tokens * a_row if shape.expert_major else 0


def make(shape, phase, poll=wait.for_flag):
    """Device functions for one kernel: namespace. poll: of wait.py, for a flag.

    rows(call, rank, source), probs(call, rank, source): addresses in the window that a rank has for a source.
    raise_flag(call, rank, row, part): of this rank's window there, behind a fence of the same thread. await_flag(call,
    source, row, part): each lane waits for the flag of its own source and row, those with row < 0 for none; whether all
    came.
    """
    ranks, rows, row_bytes, prob_bytes = shape.n_ranks, shape.tuning.window_tokens, shape.row_bytes, _prob_bytes(shape)
    memory, flags_at, what = memory_of(ranks), mailbox.window_flags_at(ranks), (phase, FOR_WINDOW)
    probs_at, rows_of_source, probs_of_source = ranks * rows * row_bytes, rows * row_bytes, rows * prob_bytes

    @device_fn
    def windows_of(call, rank):
        half = u64((u64(call.epoch) & u64(1)) * call.params[p.window_bytes])
        return u64(memory.pool(call.params, rank) + call.params[p.windows_at] + half)

    @device_fn
    def rows_at(call, rank, source):
        return u64(windows_of(call, rank) + u64(source) * u64(rows_of_source))

    @device_fn
    def probs_in(call, rank, source):
        return u64(windows_of(call, rank) + u64(probs_at) + u64(source) * u64(probs_of_source))

    @device_fn
    def flag_at(call, rank, source, row, part):
        index = u64(((u64(call.epoch) & u64(1)) * u64(ranks) + u64(source)) * u64(rows) + u64(row))
        base = u64(memory.control(call.params, rank) + u64(flags_at))
        return u64(base + u64(FLAG_BYTES) * (index * u64(MOST_PARTS) + u64(part)))

    @device_fn
    def raise_flag(call, rank, row, part):
        st_relaxed_sys_u32(flag_at(call, rank, call.my_rank, row, part), u32(call.epoch))

    @device_fn
    def await_flag(call, source, row, part):
        ok = True
        if row >= 0:
            ok = poll(call.params, flag_at(call, call.my_rank, source, row, part), u32(call.epoch), what, source)
        failed = any_lane(not ok)
        syncwarp()                              # what one lane acquired, all lanes read
        return failed == 0

    return namespace("windows", rows=rows_at, probs=probs_in, raise_flag=raise_flag, await_flag=await_flag)


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

    _, encode_part = encode_row(value_bytes, blockwise_fp8.GROUP, put, no_rest)
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


def _all_few(shape):
    """Device function (notes) -> whether no rank gets more rows than a window holds back from another one."""
    ranks, mail, rows = shape.n_ranks, mailbox.reading(shape.n_ranks), shape.tuning.window_tokens

    @device_fn
    def all_few(notes):
        most, i = i32(0), i32(lane_id())
        while i < ranks * ranks:
            source, target = split(i, ranks)
            most = i32(max(most, mail.count(notes, source, target)))
            i = i32(i + 32)
        return largest(most) <= rows

    return all_few


def _pushing(shape, flags, into):
    """Device function push(call, notes): sums of local experts into windows; a block says so for all of its warps.

    Warps of a block share its parts of rows: a sum takes long. flags: of copy.py, for the parts; into: make().
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    mail, part_of_row, spans = mailbox.reading(ranks), push.of_part(shape), parts(shape.n_vectors)
    most_shares = shape.tuning.window_shares

    @device_fn
    def warps_for_unit(n_units):
        """Warps of this block that share each of its units of work."""
        workers = i32(grid_dim() - 1)
        of_block = i32(u32(max(i32(n_units - block_idx() + workers - 1), 0)) // u32(workers))
        return i32(max(1, min(most_shares, i32(u32(n_warps()) // u32(max(of_block, 1))))))

    @device_fn
    def share_of(a, b, share, n):
        """Of vectors [a, b) the share of one of n warps."""
        run = i32(i32(u32(i32(b - a + 32 * n - 1)) // u32(32 * n)) * 32)
        first = i32(min(i32(a + share * run), b))
        return first, i32(min(i32(first + run), b))

    @device_fn
    def raise_flags(call, ends, before, n_units, n_parts):
        """A warp: of this block's units of work all flags, a lane one of another warp's."""
        fence_acq_rel_sys()
        if lane_id() == 0:                      # behind the same fence: this block has begun
            red_add_relaxed_gpu_i32(call.params[p.words] + u64(mailbox.BEGUN), i32(1))
        first, workers = i32(0), i32(grid_dim() - 1)
        while first * workers + block_idx() < n_units:
            unit = i32((first + lane_id()) * workers + block_idx())
            part, number, source = part_of_row.unit(call.my_rank, unit, n_parts)
            has_row = i32(shfl_idx(before, source)) + number < i32(shfl_idx(ends, source))
            if has_row and unit < n_units:
                into.raise_flag(call, source, number, part)
            first = i32(first + 32)

    @device_fn
    def push_rows(call, notes):
        lane, ends, rows_at, probs_at = i32(lane_id()), mail.received(notes, call.my_rank), u64(0), u64(0)
        before, n_parts, workers = of_lane_before(ends), flags.count(notes), i32(grid_dim() - 1)
        if lane < ranks:
            rows_at, probs_at = into.rows(call, lane, call.my_rank), into.probs(call, lane, call.my_rank)
        n_units = i32(largest(i32(ends - before)) * ranks * n_parts)
        n_shares = warps_for_unit(n_units)
        (team, share), teams = split(i32(warp_id()), n_shares), i32(u32(n_warps()) // u32(n_shares))
        unit = i32(team * workers + block_idx())
        if team >= teams:
            unit = i32(n_units)
        while unit < n_units:
            part, number, source = part_of_row.unit(call.my_rank, unit, n_parts)
            row = i32(warp_broadcast_i32(before, source) + number)
            if row < warp_broadcast_i32(ends, source):
                to, (a, b) = u64(warp_broadcast_u64(rows_at, source)), spans.span(part, n_parts)
                if n_shares > 1:
                    a, b = share_of(a, b, share, n_shares)
                part_of_row.row(call.params, row, u64(to + u64(number) * u64(row_bytes)), a, b, lane)
                if has_probs and part == 0 and share == 0:
                    to_probs = u64(warp_broadcast_u64(probs_at, source)) + u64(4) * u64(number) * u64(n_meta)
                    part_of_row.probs(call.params, row, to_probs, lane)
            unit = i32(unit + teams * workers)
        syncthreads()                           # the stores of all warps, before one warp releases them
        if warp_id() == 0:
            raise_flags(call, ends, before, n_units, n_parts)

    return push_rows


def _reducing(shape, flags, into):
    """Device function reduce(call, notes) -> whether all rows came: sums of tokens in pieces, a vector a lane."""
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    n_vectors, n_pieces, spans = shape.n_vectors, -(-shape.n_vectors // 32), parts(shape.n_vectors)
    sum_row, reduce_probs = reduce.sum_of_ranks(shape), reduce.of_probs(shape)

    @device_fn
    def reduce_rows(call, notes):
        params, lane, n_parts, rows_at, probs_at, ok = call.params, i32(lane_id()), flags.count(notes), u64(0), u64(0), True
        _, longest = spans.span(i32(0), n_parts)
        a_part = i32((longest + 31) >> 5)       # pieces
        if lane < ranks:
            rows_at, probs_at = into.rows(call, call.my_rank, lane), into.probs(call, call.my_rank, lane)
        unit, warps = warps_of_rank()
        while ok and unit < call.num_tokens * n_pieces:
            (token, piece), row, at_row, at_probs = split(unit, n_pieces), i32(-1), u64(0), u64(0)
            if lane < ranks:
                row = i32(load_i32(params[p.row_of] + u64(4) * u64(token * ranks + lane)))
            if row >= 0:
                at_row = u64(rows_at + u64(row) * u64(row_bytes))
                at_probs = u64(probs_at + u64(4) * u64(row) * u64(n_meta))
            ok = into.await_flag(call, lane, row, i32(u32(piece) // u32(a_part)))
            if ok:
                a, b = i32(32 * piece), i32(min(i32(32 * piece + 32), n_vectors))
                sum_row(at_row, params[p.out] + u64(token) * u64(row_bytes), a, b, lane)
                if has_probs and piece == 0:
                    reduce_probs(params, token, at_probs, lane)
            unit = i32(unit + warps)
        return ok

    return reduce_rows


def combining(shape, flags, mark):
    """Device functions of an expert-major combine: namespace. fits(notes): whether windows hold all rows, on all ranks.

    combine(call, notes): the rest of the call, of every block. The leader block ends it for the others.
    """
    into, end = make(shape, ROWS_COMBINE), calls.ends(shape.n_ranks).end
    push_rows, reduce_rows = _pushing(shape, flags, into), _reducing(shape, flags, into)
    await_announcements = announce.awaiting(shape, ROWS_COMBINE, "without_counts")

    @device_fn
    def lead(call, notes):
        if calls.is_last_thread():
            calls.say_begun(call.params)        # the others with their flags
        if await_announcements(call, notes) and calls.all_begun(call.params, ROWS_COMBINE):
            end(call)
            mark(call.params, stamps.LEFT)

    @device_fn
    def combine(call, notes):
        if calls.is_leader():
            lead(call, notes)
            return
        push_rows(call, notes)
        mark(call.params, stamps.SENT)
        if not syncthreads_or(not reduce_rows(call, notes)):
            mark(call.params, stamps.REDUCED)

    return namespace("few", fits=_all_few(shape), combine=combine)
