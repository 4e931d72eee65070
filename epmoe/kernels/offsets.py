"""The waiting block of dispatch_wait: waits for every count, and turns the counts into places of output rows."""

from epmoe.device import (block_dim, device_fn, i32, lane_id, load_u64, n_warps, shared_array, shfl_idx,
                          st_release_gpu_i32, store_i32, store_u64, syncthreads, syncthreads_or, thread_idx, u64,
                          warp_id, warp_inclusive_sum_i32)
from epmoe.device import int32
from epmoe.layout import MAX_FINITE
from epmoe_ref.config import READY

from . import counters, formats, shared_expert
from .spin import wait_for_signal
from .status import DISPATCH_WAIT

MAX_COUNTS = 4096       # counts that are looked at at a time, in shared memory
TILE_ROWS = 128         # rows of a tile of scales


def block_sum(threads):
    """Device function (value, partial) -> (sum over the lower threads of the block, sum over all); int32.

    partial: a shared int32 array of 32. A barrier for the block.
    """
    warps = threads // 32

    @device_fn
    def sums(value, partial):
        lane, warp = lane_id(), warp_id()
        inclusive = i32(warp_inclusive_sum_i32(value))
        syncthreads()                           # nobody reads `partial` of an earlier call any more
        if lane == 31:
            partial[warp] = inclusive
        syncthreads()
        of_warp = i32(0)
        if lane < warps:
            of_warp = i32(partial[lane])
        up_to = i32(warp_inclusive_sum_i32(of_warp))
        before, total = i32(shfl_idx(up_to, i32((warp + 31) & 31))), i32(shfl_idx(up_to, i32(31)))
        if warp == 0:
            before = i32(0)
        return i32(before + inclusive - value), total

    return sums


def make(cfg, block, threads):
    """Device function place_rows(params, num_tokens, my_rank) -> whether the block had to give up.

    Writes row_offsets, expert_ids, regions A and B, zeros in C, (-1, -1) as src_info of padding rows, what begin_group
    writes, and then region E, the ready flag, with release. recv_count words are MAX_FINITE again afterwards.
    """
    fmt, at = formats.of(cfg), counters.words(cfg)
    has_tiles, pad_rows, begin_group = shared_expert.formats_with_tiles(fmt), fmt.pad_rows, fmt.begin_group
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    n_counts = local * ranks
    window = max(1, min(local, threads, MAX_COUNTS // ranks))      # one thread an expert
    window_counts = window * ranks
    block_sums, share = block_sum(threads), shared_expert.share_of(cfg)
    p_counters, p_status, p_timeout = block.offset("ep_counters"), block.offset("status"), block.offset("timeout_ns")
    p_count, p_out, p_src_info = block.offset("recv_count_p"), block.offset("format_handler"), block.offset("src_info")
    p_offsets, p_ids, p_counts = block.offset("row_offsets"), block.offset("expert_ids"), block.offset("recv_counts")

    @device_fn
    def padded(n_rows):
        return i32((n_rows + pad_rows - 1) // pad_rows * pad_rows)

    @device_fn
    def end_group(params, group, start, n_rows):
        """The group's end in row_offsets, its id, and nobody as the source of its padding rows."""
        end = i32(start + padded(n_rows))
        store_i32(u64(load_u64(params + u64(p_offsets))) + u64(4) * u64(group + 1), end)
        store_i32(u64(load_u64(params + u64(p_ids))) + u64(4) * u64(group), group)
        src_info = u64(load_u64(params + u64(p_src_info)))
        row = i32(start + n_rows)
        while row < end:
            store_i32(src_info + u64(8) * u64(row), i32(-1))
            store_i32(src_info + u64(8) * u64(row) + u64(4), i32(-1))
            row = i32(row + 1)

    @device_fn
    def place_expert(params, words, local_expert, start, counts, at_count):
        """Regions A, B and C of one expert, and its counts for the caller."""
        given = u64(load_u64(params + u64(p_counts)))
        within, r = i32(0), i32(0)
        while r < ranks:
            i, count = i32(local_expert * ranks + r), i32(counts[at_count + r])
            within = i32(within + count)
            store_i32(words + u64(at.a) + u64(8) * u64(i), i32(READY + start + within))
            store_i32(words + u64(at.a) + u64(8) * u64(i) + u64(4), count)
            store_i32(words + u64(at.b) + u64(4) * u64(i), within)
            if given != u64(0):
                store_i32(given + u64(4) * u64(i), count)
            r = i32(r + 1)
        store_i32(words + u64(at.c) + u64(4) * u64(local_expert), i32(0))

    @device_fn
    def await_counts(params, first, here, counts):
        """The counts of `here` experts from `first` on, acquired; returns whether all came."""
        status, timeout_ns = u64(load_u64(params + u64(p_status))), u64(load_u64(params + u64(p_timeout)))
        recv_count = u64(load_u64(params + u64(p_count)))
        ok, i = True, i32(thread_idx())
        while ok and i < here * ranks:
            entry = i32(first * ranks + i)
            count = wait_for_signal(recv_count + u64(8) * u64(entry), status, timeout_ns, DISPATCH_WAIT, entry)
            ok = count != u64(MAX_FINITE)
            if ok:
                counts[i] = i32(count)
            i = i32(i + block_dim())
        return ok

    @device_fn
    def begin_groups(params, first, here, starts, tiles):
        i = i32(warp_id())
        while i < here:
            begin_group(params + u64(p_out), i32(front + first + i), i32(starts[i]), i32(tiles[i]), lane_id())
            i = i32(i + n_warps())

    @device_fn
    def place_rows(params, num_tokens, my_rank):
        counts, partial = shared_array(window_counts, int32), shared_array(32, int32)
        words, tid = u64(load_u64(params + u64(p_counters))), i32(thread_idx())
        n_shared, _ = share(num_tokens, my_rank)
        next_row, next_tile = padded(n_shared), i32((n_shared + TILE_ROWS - 1) // TILE_ROWS)
        if tid == 0:
            store_i32(u64(load_u64(params + u64(p_offsets))), i32(0))
            if front == 1:
                end_group(params, i32(0), i32(0), n_shared)
        first = i32(0)
        while first < local:
            here = i32(min(window, local - first))
            if syncthreads_or(not await_counts(params, first, here, counts)):   # every thread acquired for all
                return True
            n_rows, r = i32(0), i32(0)
            while tid < here and r < ranks:
                n_rows = i32(n_rows + counts[tid * ranks + r])
                r = i32(r + 1)
            before, rows_here = block_sums(padded(n_rows), partial)
            start = i32(next_row + before)
            if tid < here:
                end_group(params, i32(front + first + tid), start, n_rows)
                place_expert(params, words, i32(first + tid), start, counts, i32(tid * ranks))
            if has_tiles:
                starts, tiles = shared_array(window, int32), shared_array(window, int32)
                tiles_before, tiles_here = block_sums(i32((n_rows + TILE_ROWS - 1) // TILE_ROWS), partial)
                if tid < here:
                    starts[tid], tiles[tid] = start, i32(next_tile + tiles_before)
                syncthreads()                   # starts and tiles of all threads
                begin_groups(params, first, here, starts, tiles)
                next_tile = i32(next_tile + tiles_here)
            next_row, first = i32(next_row + rows_here), i32(first + here)
            syncthreads()                       # A, B, C and begin_group before the flag; counts before they change
        if tid == 0:
            st_release_gpu_i32(words + u64(at.e), i32(READY))           # acquired by the copying blocks
        # A peer signals these words again only after this rank's next combine has answered it.
        recv_count = u64(load_u64(params + u64(p_count)))
        while tid < n_counts:
            store_u64(recv_count + u64(8) * u64(tid), u64(MAX_FINITE))
            tid = i32(tid + block_dim())
        return False

    return place_rows
