"""The copying blocks of dispatch_wait: messages out of recv_buf into the rows of the grouped output.

A warp claims a tile of rows of one expert by fetch-add on region C, so that blocks which come late find less to do.
"""

from epmoe import layout
from epmoe.device import (atomic_add_relaxed_gpu_i32, ballot, block_idx, device_fn, ffs, grid_dim, i32, lane_id,
                          ld_relaxed_gpu_i32, load_i32, load_u64, n_warps, store_i32, syncthreads_or, thread_idx, u32,
                          u64, warp_broadcast_i32, warp_id, warp_sum_i32)
from epmoe_ref.config import READY

from . import counters, formats, message, shared_expert
from .offsets import TILE_ROWS
from .spin import wait_for_flag
from .status import DISPATCH_WAIT

CLAIMS_A_WARP = 4       # the size of a claimed tile is such that each warp gets about so many
MAX_CLAIM = 32          # rows


def make(cfg, block):
    """Device function copy_rows(params, num_tokens, my_rank) -> whether the block had to give up."""
    fmt, at, sizes = formats.of(cfg), counters.words(cfg), layout.message(cfg)
    has_tiles, decode, finish_group = shared_expert.formats_with_tiles(fmt), fmt.decode, fmt.finish_group
    read_trailer, share = message.make(cfg).read, shared_expert.share_of(cfg)
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    tokens_per_rank, msg_bytes, n_groups = cfg.max_tokens_per_rank, sizes.msg_bytes, cfg.n_groups
    p_counters, p_status, p_timeout = block.offset("ep_counters"), block.offset("status"), block.offset("timeout_ns")
    p_recv, p_out, p_src_info = block.offset("recv_buf_p"), block.offset("format_handler"), block.offset("src_info")

    @device_fn
    def rows_of(words, local_expert):
        """Rows of an expert: the last of its prefix sums in region B."""
        return i32(load_i32(words + u64(at.b) + u64(4) * u64(local_expert * ranks + ranks - 1)))

    @device_fn
    def start_of(words, local_expert):
        """Output row at which an expert's rows begin, from region A."""
        entry = words + u64(at.a) + u64(8) * u64(local_expert * ranks)
        return i32(load_i32(entry) - READY - load_i32(entry + u64(4)))

    @device_fn
    def claim(words, favourite, tile_rows, lane):
        """(local expert, tile) that nobody has; (-1, 0) if there is none. The search begins at the favourite expert."""
        probe = i32(0)
        while probe < local:
            # a lane looks at an expert
            expert = i32(favourite + probe + lane)
            if expert >= local:
                expert = i32(expert - local)
            n_rows, is_open = i32(0), False
            if probe + lane < local:
                n_rows = rows_of(words, expert)
                is_open = ld_relaxed_gpu_i32(words + u64(at.c) + u64(4) * u64(expert)) * tile_rows < n_rows
            candidates = u32(ballot(is_open))
            while candidates != u32(0):
                chosen, tile = i32(ffs(candidates) - 1), i32(0)
                if lane == chosen:
                    tile = i32(atomic_add_relaxed_gpu_i32(words + u64(at.c) + u64(4) * u64(expert), i32(1)))
                    if tile * tile_rows >= n_rows:
                        tile = i32(-1)              # others were faster
                tile = i32(warp_broadcast_i32(tile, chosen))
                if tile >= 0:
                    return i32(warp_broadcast_i32(expert, chosen)), tile
                candidates = u32(candidates & u32(candidates - u32(1)))
            probe = i32(probe + 32)
        return i32(-1), i32(0)

    @device_fn
    def source_of(words, local_expert, row, lane):
        """(source rank, slot) of an expert's row, from region B."""
        base = i32(0)
        while True:
            end = i32(row + 1)
            if base + lane < ranks:
                end = i32(load_i32(words + u64(at.b) + u64(4) * u64(local_expert * ranks + base + lane)))
            behind = u32(ballot(end > row))
            if behind != u32(0):
                break
            base = i32(base + 32)
        rank, before = i32(base + ffs(behind) - 1), i32(0)
        if rank > 0:
            before = i32(load_i32(words + u64(at.b) + u64(4) * u64(local_expert * ranks + rank - 1)))
        return rank, i32(row - before)

    @device_fn
    def copy_row(params, words, local_expert, row_in_group, start, my_rank, lane):
        rank, slot = source_of(words, local_expert, row_in_group, lane)
        entry = u64(local_expert * ranks + rank) * u64(tokens_per_rank) + u64(slot)
        src = u64(load_u64(params + u64(p_recv))) + entry * u64(msg_bytes)
        token, k = read_trailer(src, i32(my_rank * local + local_expert), lane)
        row = i32(start + row_in_group)
        if lane < 2:
            half = token
            if lane == 1:
                half = k
            store_i32(u64(load_u64(params + u64(p_src_info))) + u64(4) * u64(2 * row + lane), half)
        decode(src, params + u64(p_out), row, i32(front + local_expert), row_in_group, start, lane)

    @device_fn
    def finish_groups(params, words, n_shared, lane):
        """Clears the scales behind the rows of each group's last tile; a warp takes a group."""
        group = i32(warp_id() * (grid_dim() - 1) + block_idx() - 1)
        while group < n_groups:
            n_rows, start, tiles = n_shared, i32(0), i32(0)
            if group >= front:
                n_rows, start = rows_of(words, group - front), start_of(words, group - front)
                expert = lane
                while expert < group - front:
                    tiles = i32(tiles + (rows_of(words, expert) + TILE_ROWS - 1) // TILE_ROWS)
                    expert = i32(expert + 32)
                tiles = i32(warp_sum_i32(tiles) + (n_shared + TILE_ROWS - 1) // TILE_ROWS)
            finish_group(params + u64(p_out), group, start, n_rows, tiles, lane)
            group = i32(group + n_warps() * (grid_dim() - 1))

    @device_fn
    def copy_rows(params, num_tokens, my_rank):
        words, lane = u64(load_u64(params + u64(p_counters))), i32(lane_id())
        ok = True
        if thread_idx() == 0:
            # the waiting block's release covers the messages that it acquired, and regions A, B and C
            ok = wait_for_flag(words + u64(at.e), u64(load_u64(params + u64(p_status))),
                               u64(load_u64(params + u64(p_timeout))), DISPATCH_WAIT, i32(0))
        if syncthreads_or(not ok):                  # thread 0 acquired for all
            return True
        warps = i32(n_warps() * (grid_dim() - 1))
        here = i32(warp_id() * (grid_dim() - 1) + block_idx() - 1)
        n_rows = i32(start_of(words, local - 1) + rows_of(words, local - 1))
        tile_rows = i32(max(1, min(MAX_CLAIM, n_rows // (CLAIMS_A_WARP * warps))))
        favourite = i32(here % local)
        while favourite >= 0:
            favourite, tile = claim(words, favourite, tile_rows, lane)
            if favourite >= 0:
                row, start = i32(tile * tile_rows), start_of(words, favourite)
                end = i32(min(row + tile_rows, rows_of(words, favourite)))
                while row < end:
                    copy_row(params, words, favourite, row, start, my_rank, lane)
                    row = i32(row + 1)
        if has_tiles:
            n_shared, _ = share(num_tokens, my_rank)
            finish_groups(params, words, n_shared, lane)
        return False

    return copy_rows
