"""Pushes rows back to their tokens' ranks; expert-major rows are summed over local experts first."""

from epmoe.device import (SIM, ballot, block_idx, device_fn, fence_acq_rel_sys, ffs, grid_dim, i32, lane_id, load16,
                          load_i32, load_u32, n_warps, red_add_relaxed_gpu_i32, shfl_idx, store16,
                          store_u32, syncthreads, syncwarp, u32, u64, warp_broadcast_i32, warp_broadcast_u64, warp_id)

from .. import elements
from . import control, peers, row_flags, row_sums, waits, windows
from .row_copy import VECTOR, copy_to_lanes, parts


MOST_SHARES = 4         # of a part of a row that warps share
MANY = 3 if SIM else 64     # blocks: fewer push whole rows, whose warps wait less often for a release


def expert_sums(shape, block):
    """Device function sum_row(params, row, to, first, end, lane): vectors [first, end) of the sum over local experts.

    float32 from +0.0, experts ascending, rounded once, stored at `to`. Experts without a row of this token are not
    read.
    """
    numbers, (gather, sum_rows) = elements.make(shape.dtype), row_sums.make(shape.dtype)
    zeros, add, pack = numbers.zeros, numbers.add, numbers.pack
    local, row_bytes = shape.n_local_experts, shape.row_bytes
    p_x, p_expert_row = block.index("x"), block.index("expert_row")

    @device_fn
    def experts_from(params, x, row, first, lane):
        """Address of the row of expert first + lane, 0 if it has none; x: of all rows. Without a branch before votes."""
        at, expert = u64(0), i32(min(i32(first + lane), i32(local - 1)))
        known = params[p_expert_row] + u64(4) * (u64(row) * u64(local) + u64(expert))
        expert_row = i32(load_i32(known))
        if first + lane < local and expert_row >= 0:
            at = x + u64(expert_row) * u64(row_bytes)
        return at

    @device_fn
    def sum_many(params, x, row, to, first, end, lane):
        """More experts than lanes: window by window, again for every vector."""
        base = i32(first)
        while base < end:
            at, sums, expert = u64(VECTOR) * u64(min(i32(base + lane), i32(end - 1))), zeros(), i32(0)
            while expert < local:
                places = experts_from(params, x, row, expert, lane)
                syncwarp()                      # as in row_sums.py
                left = u32(ballot(places != u64(0)))
                while left != u32(0):
                    sums = add(sums, load16(u64(warp_broadcast_u64(places, i32(ffs(left) - 1))) + at))
                    left = u32(left & u32(left - u32(1)))
                expert = i32(expert + 32)
            q = pack(sums)
            if base + lane < end:
                store16(to + at, q[0], q[1], q[2], q[3])
            base = i32(base + 32)

    @device_fn
    def sum_row(params, row, to, first, end, lane):
        rows, n, expert, x = u64(0), i32(0), i32(0), params[p_x]
        while expert < local:                   # two windows of experts in flight
            a, b = experts_from(params, x, row, expert, lane), experts_from(params, x, row, i32(expert + 32), lane)
            rows, n = gather(a, rows, n, lane)
            rows, n = gather(b, rows, n, lane)
            expert = i32(expert + 64)
        if n <= row_sums.MOST:
            sum_rows(rows, n, to, first, end, lane)
        else:
            sum_many(params, x, row, to, first, end, lane)

    return sum_row


def keeps_own(shape):
    """Whether a rank's own rows are read in place instead of being pushed."""
    return not shape.expert_major


def n_targets_of(shape):
    """Ranks that a rank pushes rows to."""
    return shape.n_ranks - keeps_own(shape)


def make(shape, block, flags, few):
    """Device function push(params, epoch, my_rank, notes, are_few): the rows that this rank received, back.

    Each to its src_rank, at [row of the source's handle]. Warps take parts of rows, few blocks whole ones, in turn,
    beginning with the first tokens of every rank, so that tokens become whole one after another. Few rows go into
    windows, all at once, and a block says so for all of its warps, which share their parts by expert. flags: of
    row_flags; few: of windows.
    """
    ranks, local, row_bytes, n_meta = shape.n_ranks, shape.n_local_experts, shape.row_bytes, shape.n_meta
    expert_major, has_probs = shape.expert_major, shape.has_probs
    place, (_, _, _, received, returned_before_me) = peers.place_in(block, ranks), peers.sums(ranks)
    (count_parts, raise_flags, raise_row, _, _), raise_flag = flags, few.raise_flag
    n_targets, rows_in_window, probs_in_window = n_targets_of(shape), few.at[windows.X], few.at[windows.PROBS]
    _, part_span = parts(row_bytes // VECTOR)
    _, _, copy = copy_to_lanes(read_only=True)
    sum_row, take = expert_sums(shape, block), waits.claims(block, control.TAKEN)
    p_x, p_probs, p_expert_row = block.index("x"), block.index("probs"), block.index("expert_row")
    p_words = block.index("words")

    @device_fn
    def unit_of(my_rank, unit, n_parts):
        """(part, number among the rows for a rank, that rank) of a unit of work."""
        turn = u32(u32(unit) // u32(n_parts))
        part, number = i32(unit - i32(turn) * n_parts), i32(u32(turn // u32(max(n_targets, 1))))
        source = i32(my_rank + 1 + i32(turn) - number * max(n_targets, 1))
        if source >= ranks:
            source = i32(source - ranks)
        return part, number, source

    @device_fn
    def shares(n_units, workers):
        """Warps of this block that share each of its units of work, few rows by expert: a sum takes long."""
        n = i32(1)
        if expert_major:
            of_block = i32(u32(max(i32(n_units - block_idx() + workers - 1), 0)) // u32(workers))
            n = i32(max(1, min(MOST_SHARES, i32(u32(n_warps()) // u32(max(of_block, 1))))))
        return n

    @device_fn
    def share_of(a, b, share, n):
        """Of vectors [a, b) the share of one of n warps."""
        run = i32(i32(u32(i32(b - a + 32 * n - 1)) // u32(32 * n)) * 32)
        first = i32(min(i32(a + share * run), b))
        return first, i32(min(i32(first + run), b))

    @device_fn
    def flag_units(params, epoch, my_rank, ends, before, n_units, n_parts):
        """A warp: of this block's units of work all flags in windows, a lane one of another warp's."""
        fence_acq_rel_sys()
        if lane_id() == 0:                      # behind the same fence: this block has begun
            red_add_relaxed_gpu_i32(params[p_words] + u64(control.BEGUN), i32(1))
        first, workers = i32(0), i32(grid_dim() - 1)
        while first * workers + block_idx() < n_units:
            unit = i32((first + lane_id()) * workers + block_idx())
            part, number, source = unit_of(my_rank, unit, n_parts)
            has_row = i32(shfl_idx(before, source)) + number < i32(shfl_idx(ends, source))
            if has_row and unit < n_units:
                raise_flag(params, epoch, source, my_rank, number, part)
            first = i32(first + 32)

    @device_fn
    def push_probs(params, row, to, lane):
        """The row's numbers: as they are, or, expert-major, those of its experts' rows, 0 where it has none."""
        probs, i = params[p_probs], i32(lane)
        while i < n_meta:
            src, there = i32(0), True
            if expert_major:
                known = params[p_expert_row] + u64(4) * (u64(row) * u64(local) + u64(i))
                src = i32(load_i32(known))
                there = src >= 0
            value = u32(0)
            if there:
                at = u64(src)
                if not expert_major:
                    at = u64(row) * u64(n_meta) + u64(i)
                value = u32(load_u32(probs + u64(4) * at))
            store_u32(to + u64(4) * u64(i), value)
            i = i32(i + 32)

    @device_fn
    def push(params, epoch, my_rank, notes, are_few):
        lane, x = i32(lane_id()), params[p_x]
        ends, first_row = received(notes, my_rank), returned_before_me(notes, my_rank)
        before, rows_at, probs_at = peers.of_lane_before(ends), u64(0), u64(0)
        if are_few:
            first_row = i32(0)
            if lane < ranks:
                rows_at = rows_in_window(params, epoch, lane, my_rank)
                probs_at = probs_in_window(params, epoch, lane, my_rank)
        elif lane < ranks:
            rows_at, probs_at = place(params, notes, i32(0), lane), place(params, notes, i32(2), lane)
        here = i32(ends - before)
        if n_targets < ranks and lane == my_rank:
            here = i32(0)
        n_parts, most, workers = count_parts(notes), row_flags.largest(here), i32(grid_dim() - 1)
        warps, unit, following = i32(n_warps() * workers), i32(warp_id() * workers + block_idx()), i32(0)
        a_row, whole = i32(n_parts), not are_few and grid_dim() < MANY
        if whole:
            a_row = i32(1)
        n_units, share, n_shares = i32(most * n_targets * a_row), i32(0), i32(1)
        if not are_few:
            unit = take(params, epoch, lane)
        elif expert_major:
            n_shares = shares(n_units, workers)
            number, teams = i32(u32(warp_id()) // u32(n_shares)), i32(u32(n_warps()) // u32(n_shares))
            share, unit = i32(warp_id() - number * n_shares), i32(number * workers + block_idx())
            warps = i32(teams * workers)
            if number >= teams:
                unit = i32(n_units)
        while unit < n_units:
            following = i32(unit + warps)
            if not are_few:
                following = take(params, epoch, lane)
            part, number, source = unit_of(my_rank, unit, a_row)
            row = i32(warp_broadcast_i32(before, source) + number)
            if row < warp_broadcast_i32(ends, source):
                to_row = i32(warp_broadcast_i32(first_row, source) + number)
                to = u64(u64(warp_broadcast_u64(rows_at, source)) + u64(to_row) * u64(row_bytes))
                a, b = part_span(part, a_row)
                if expert_major:
                    if n_shares > 1:
                        a, b = share_of(a, b, share, n_shares)
                    sum_row(params, row, to, a, b, lane)
                else:
                    copy(x + u64(row) * u64(row_bytes), to, u32(1), i32(0), a, b, lane)
                if has_probs and part == 0 and share == 0:
                    to_probs = u64(warp_broadcast_u64(probs_at, source)) + u64(4) * u64(to_row) * u64(n_meta)
                    push_probs(params, row, to_probs, lane)
                if whole:
                    raise_row(params, source, to_row, n_parts, epoch, lane)
                elif not are_few:
                    raise_flags(params, u32(u32(1) << u32(source)), to_row, part, epoch, lane)
            unit = i32(following)
        if are_few:
            syncthreads()                       # the stores of all warps, before one warp releases them
            if warp_id() == 0:
                flag_units(params, epoch, my_rank, ends, before, n_units, n_parts)

    return push
