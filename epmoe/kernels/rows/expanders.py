"""Expanding rows while they arrive: each part of a row, when its flag is up, to the rows of its experts."""

from epmoe.device import (block_idx, device_fn, grid_dim, i32, lane_id, load_u64, n_warps, shfl_up,
                          st_release_gpu_i32, syncthreads_or, thread_idx, u64, warp_broadcast_i32, warp_id)

from ..spin import wait_for_own_blocks
from . import control, expand, peers, roles, row_flags, waits
from .row_copy import parts
from .status import FOR_BLOCKS, ROWS_DISPATCH


def make(shape, block, flags):
    """Device functions (recorded, expand_rows) for one kernel.

    recorded(params, epoch): of the clerk, when the places of experts' rows are written down. expand_rows(params, epoch,
    my_rank, notes) -> whether all rows came: every block, those that send when they have sent. Warps take parts of rows
    in turn; each row is expected when its source's block comes to it. flags: of row_flags.
    """
    ranks, has_meta, n_words = shape.n_ranks, shape.has_meta, control.experts_at(shape.n_ranks)
    expand_row, clear_rows = expand.make(shape, block)
    _, _, _, received, _ = peers.sums(ranks)
    claim, sending, (count_parts, _, await_flag) = waits.claims(block), roles.sending(shape), flags
    _, part_span = parts(expand.vectors_of(shape))
    p_words, p_timeout = block.offset("words"), block.offset("timeout_ns")

    @device_fn
    def recorded(params, epoch):
        if thread_idx() == 0:                   # a barrier lies behind the last store
            st_release_gpu_i32(u64(load_u64(params + u64(p_words))) + u64(control.RECORDED), i32(epoch))

    @device_fn
    def await_records(params, epoch):
        words, ok = u64(load_u64(params + u64(p_words))), True
        if thread_idx() == 0:
            ok = wait_for_own_blocks(words + u64(control.RECORDED), i32(epoch), words + u64(control.STATUS),
                                     u64(load_u64(params + u64(p_timeout))), ROWS_DISPATCH, FOR_BLOCKS, i32(0))
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
        # lane r: the rows of rank r; each of its blocks sends a run of them
        ends, n_blocks = received(notes, my_rank), i32(1)
        before = i32(shfl_up(ends, 1))
        if lane == 0:
            before = i32(0)
        if lane < ranks:
            n_blocks = i32(notes[lane * n_words + control.BLOCKS])
        run = i32((ends - before + n_blocks - 1) // n_blocks)
        n_parts, turns = count_parts(notes), row_flags.largest(i32(run * n_blocks))
        unit, ok = claim(params, epoch, lane), True
        while ok and unit < turns * ranks * n_parts:
            following = claim(params, epoch, lane)
            part, turn = i32(unit % n_parts), i32(unit // n_parts)
            source = i32((my_rank + turn % ranks) % ranks)
            turn = i32(turn // ranks)
            blocks, a_run = i32(warp_broadcast_i32(n_blocks, source)), i32(warp_broadcast_i32(run, source))
            row = i32(warp_broadcast_i32(before, source) + turn % blocks * a_run + turn // blocks)
            if turn < blocks * a_run and row < warp_broadcast_i32(ends, source):
                awaited, its_part = i32(-1), i32(part)
                if lane < 2:
                    awaited = i32(row)
                if lane == 0:
                    its_part = i32(0)           # what goes with the row comes with its first part
                ok = await_flag(params, my_rank, awaited, its_part, epoch, source)
                if ok:
                    a, b = part_span(part, n_parts)
                    expand_row(params, row, source, a, b, part == 0, lane)
            unit = i32(following)
        return ok

    return recorded, expand_rows
