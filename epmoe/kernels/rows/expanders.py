"""Expands rows while they arrive: each part of a row, when its flag is up, to the rows of its experts."""

from epmoe.device import (SIM, ballot, block_idx, device_fn, ffs, grid_dim, i32, lane_id, n_warps, shfl_idx,
                          st_release_gpu_i32, syncthreads_or, syncwarp, thread_idx, u32, u64,
                          warp_broadcast_i32, warp_id)

from ..spin import wait_for_own_blocks
from . import control, expand, peers, roles, row_flags, senders, waits
from .row_copy import parts
from .status import FOR_BLOCKS, ROWS_DISPATCH

AT_ONCE = 4             # parts of rows that a warp takes, where there are as many for each
LOOKS = 2 if SIM else 64    # at the flags of all of them, before it waits for the first


def make(shape, block, flags):
    """Device functions (recorded, expand_rows) for one kernel.

    recorded(params, epoch): of the leader block, when the places of experts' rows are written down. expand_rows(params, epoch,
    my_rank, notes) -> whether all rows came: every block, those that send when they have sent. Warps take a few
    parts of rows at a time, and expand them as they come. flags: of row_flags.
    """
    ranks, has_meta = shape.n_ranks, shape.has_meta
    expand_row, clear_rows = expand.make(shape, block)
    _, _, _, received, _ = peers.sums(ranks)
    claim, sending = waits.claims(block, control.CLAIMED), roles.sending(shape)
    count_parts, _, _, is_up, await_flag = flags
    _, part_span = parts(senders.vectors_of(shape))
    p_words, p_timeout = block.index("words"), block.index("timeout_ns")

    @device_fn
    def recorded(params, epoch):
        if thread_idx() == 0:                   # a barrier lies behind the last store
            st_release_gpu_i32(params[p_words] + u64(control.RECORDED), i32(epoch))

    @device_fn
    def await_records(params, epoch):
        words, ok = params[p_words], True
        if thread_idx() == 0:
            ok = wait_for_own_blocks(words + u64(control.RECORDED), i32(epoch), words + u64(control.STATUS),
                                     params[p_timeout], ROWS_DISPATCH, FOR_BLOCKS, i32(0))
        return not syncthreads_or(not ok)       # thread 0 acquired for all

    @device_fn
    def clear_share(params, lane):
        """The share of a block that does not send: there is time until the first row comes."""
        others = i32(grid_dim() - sending())
        if block_idx() >= sending():
            clear_rows(params, i32(warp_id() * others + block_idx() - sending()), i32(n_warps() * others), lane)

    @device_fn
    def expand_rows(params, epoch, my_rank, notes):
        if has_meta:
            if not await_records(params, epoch):
                return False
        lane = i32(lane_id())
        clear_share(params, lane)
        ends = received(notes, my_rank)
        before = peers.of_lane_before(ends)
        n_parts = count_parts(notes)
        n_units = i32(row_flags.largest(i32(ends - before)) * ranks * n_parts)
        at_once = i32(max(1, min(AT_ONCE, i32(u32(n_units) // u32(i32(n_warps() * grid_dim()))))))
        batch, ok = claim(params, epoch, lane), True
        while ok and batch * at_once < n_units:
            following = claim(params, epoch, lane)
            # lane i has the i-th part of a row; those of all ranks are expected to come side by side
            unit = i32(batch * at_once + lane)
            turn = i32(u32(unit) // u32(n_parts))
            part, number = i32(unit - turn * n_parts), i32(u32(turn) // u32(ranks))
            source = i32(u32(i32(my_rank + turn)) % u32(ranks))
            row, end = i32(shfl_idx(before, source) + number), i32(shfl_idx(ends, source))
            is_row = lane < at_once and row < end
            left, looks = u32(ballot(is_row)), i32(0)
            while ok and left != u32(0):
                has_come = False
                if u32(left >> u32(lane)) & u32(1) != u32(0):
                    # what goes with the row comes with its first part
                    has_come = is_up(params, my_rank, row, part, epoch) and is_up(params, my_rank, row, i32(0), epoch)
                come, looks = u32(ballot(has_come)), i32(looks + 1)
                if come == u32(0) and looks % LOOKS == 0:
                    awaited, first = i32(-1), i32(ffs(left) - 1)
                    if lane == first:
                        awaited = row
                    ok = await_flag(params, my_rank, awaited, part, epoch, source)
                    if ok:
                        ok = await_flag(params, my_rank, awaited, i32(0), epoch, source)
                syncwarp()                      # what one lane acquired, all lanes read
                while come != u32(0):
                    one = i32(ffs(come) - 1)
                    its_part = i32(warp_broadcast_i32(part, one))
                    a, b = part_span(its_part, n_parts)
                    expand_row(params, i32(warp_broadcast_i32(row, one)), i32(warp_broadcast_i32(source, one)), a, b,
                               its_part == 0, lane)
                    come, left = u32(come & u32(come - u32(1))), u32(left & ~(u32(1) << u32(one)))
            batch = i32(following)
        return ok

    return recorded, expand_rows
