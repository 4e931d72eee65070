"""The waiting half of dispatch: awaits signals, numbers rows, decodes messages into rows. `make` lists its steps."""

from types import ModuleType
from typing import NamedTuple

from epmoe.device import (address_of, atomic_add_acq_rel_gpu_i32, atomic_add_relaxed_gpu_i32, block_dim, block_idx,
                          device_fn, grid_dim, i32, int32, lane_id, load_i32, n_warps, shared_array,
                          st_release_gpu_i32, store_i32, syncthreads, syncthreads_or, thread_idx, u64,
                          warp_broadcast_i32, warp_id, warp_inclusive_sum_i32)
from epmoe_ref.config import READY

from .. import formats
from ..formats import RowPlace
from ..formats.nv_block_scaled import TILE_ROWS as SCALE_ROWS
from ..params import LANES
from ..status import FOR_READY, FOR_SEND_BUF
from . import counters, messages, waits
from .counters import namespace

TILE_ROWS = 128     # that a block claims together


class Outputs(NamedTuple):
    """The arrays that dispatch fills; `recv_counts` is the address of int32 [n_local_experts, n_src_ranks], or 0."""

    format_handler: tuple
    row_offsets: tuple
    expert_ids: tuple
    src_info: tuple
    recv_counts: int


class Inbox(NamedTuple):
    """Addresses of the memory that peers write on this rank, and of its counters."""

    recv_buf_p: int
    recv_count_p: int
    ep_counters: int
    my_rank: int


def shared_expert_share(cfg):
    """Device function (num_tokens, my_rank) -> (first, n_shared), this rank's tokens for the shared expert.

    Under skip_a2a the ranks of allreduce_world_size share the tokens. Otherwise a rank takes all of its own.
    """
    fused, skip_a2a, world = cfg.fused_shared_expert, cfg.skip_a2a, cfg.allreduce_world_size

    @device_fn
    def share(num_tokens, my_rank):
        if not fused:
            return i32(0), i32(0)
        if not skip_a2a:
            return i32(0), i32(num_tokens)
        r = i32(my_rank % world)
        n_shared = i32((num_tokens + world - r - 1) // world)
        return i32(r * (num_tokens // world) + min(r, i32(num_tokens % world))), n_shared

    return share


def make(cfg) -> ModuleType:
    """Namespace "receive": all blocks call rows(out, inbox, send_buf_p, num_tokens, waiter), the waiting half. Steps:

    await_signals: block 0 awaits all counts, writes them into region A, resets recv_count. Returns whether all came.
    number_rows: block 0 writes B, zeroes C, writes row_offsets and expert_ids, raises E, writes the end rows of A.
    await_rows: every block waits until E is raised. Returns whether it was.
    put_shared: decodes the shared expert's rows from send_buf once F counts them. A warp claims rows by fetch-add on G.
    put_tiles: decodes the routed rows, one expert at a time. A block claims tiles of 128 rows by fetch-add on C.
    fill_rest: writes unused scales of a tile and src_info of padding rows, which no message fills.
    clear_counters: the last block to count itself in D zeroes the counters that counters.py lists.

    A group is the rows of one expert. With fused_shared_expert group 0 is the shared expert, else local expert 0.
    """
    fmt, word, message, share = formats.of(cfg), counters.words(cfg), messages.make(cfg), shared_expert_share(cfg)
    local, ranks, slots = cfg.n_local_experts, cfg.n_src_ranks, cfg.max_tokens_per_rank
    groups, front, pad = cfg.n_groups, int(cfg.fused_shared_expert), fmt.pad_rows    # front: groups before the routed ones
    of_handler, tiles_before = handler_words(fmt), tiles_of(fmt)
    begin_group, finish_group, decode = fmt.begin_group, fmt.finish_group, fmt.decode

    @device_fn
    def to_region_a(ep_counters, i, count):
        store_i32(word.a_count(ep_counters, i), count)

    await_signals = waits.all_signals(cfg, to_region_a)

    @device_fn
    def sum_over_ranks(inbox):
        """Writes inclusive sums of the counts within each expert into region B. Zeroes C: no tile is claimed."""
        local_expert = i32(thread_idx())
        while local_expert < local:
            rows, r = i32(0), i32(0)
            while r < ranks:
                i = i32(local_expert * ranks + r)
                rows = i32(rows + load_i32(word.a_count(inbox.ep_counters, i)))
                store_i32(word.b(inbox.ep_counters, i), rows)
                r = i32(r + 1)
            store_i32(word.c(inbox.ep_counters, local_expert), i32(0))
            local_expert = i32(local_expert + block_dim())

    @device_fn
    def rows_of(inbox, local_expert):
        """The number of rows of a local expert: the last of its sums."""
        return i32(load_i32(word.b(inbox.ep_counters, i32(local_expert * ranks + ranks - 1))))

    @device_fn
    def offset_groups(out, inbox, n_shared):
        """One warp writes row_offsets and expert_ids, and gives the format each group's first tile. A lane a group."""
        lane, first, start, tile = i32(lane_id()), i32(0), i32(0), i32(0)
        if lane == 0:
            out.row_offsets[0] = 0
        while first < groups:
            group = i32(first + lane)
            n_rows = i32(0)
            if group < front:
                n_rows = i32(n_shared)
            elif group < groups:
                n_rows = rows_of(inbox, i32(group - front))
            padded = i32((n_rows + pad - 1) // pad * pad)
            n_tiles = i32((n_rows + SCALE_ROWS - 1) // SCALE_ROWS)
            end = i32(start + warp_inclusive_sum_i32(padded))
            end_tile = i32(tile + warp_inclusive_sum_i32(n_tiles))
            if group < groups:
                out.row_offsets[group + 1] = end
                out.expert_ids[group] = group
                begin_group(of_handler(out.format_handler), group, i32(end - padded), i32(end_tile - n_tiles))
            start, tile = i32(warp_broadcast_i32(end, LANES - 1)), i32(warp_broadcast_i32(end_tile, LANES - 1))
            first = i32(first + LANES)

    @device_fn
    def number_rows(out, inbox, n_shared):
        sum_over_ranks(inbox)
        syncthreads()
        if warp_id() == 0:
            offset_groups(out, inbox, n_shared)
        syncthreads()
        if thread_idx() == 0:                   # A and recv_counts are for later launches
            st_release_gpu_i32(word.e(inbox.ep_counters, 0), i32(READY))
        i = i32(thread_idx())
        while i < local * ranks:
            start = i32(out.row_offsets[front + i // ranks])
            end = i32(start + load_i32(word.b(inbox.ep_counters, i)))
            store_i32(word.a_end(inbox.ep_counters, i), i32(READY + end))
            if out.recv_counts != u64(0):
                store_i32(u64(out.recv_counts) + u64(4 * i), load_i32(word.a_count(inbox.ep_counters, i)))
            i = i32(i + block_dim())

    @device_fn
    def await_rows(inbox, waiter):
        ok = True
        if thread_idx() == 0:
            longer = waits.with_longer_timeout(waiter)
            ok = waits.wait_for_counter(word.e(inbox.ep_counters, 0), READY, longer, FOR_READY, 0)
        return not syncthreads_or(not ok)       # what thread 0 acquired, all threads of the block see

    @device_fn
    def put_shared(out, inbox, send_buf_p, num_tokens, waiter):
        first, n_rows = share(num_tokens, inbox.my_rank)
        ok = True
        if thread_idx() == 0 and n_rows > 0:
            ok = waits.wait_for_counter(word.f(inbox.ep_counters, 0), n_rows, waiter, FOR_SEND_BUF, 0)
        if syncthreads_or(not ok):
            return False
        row, lane = i32(0), i32(lane_id())
        while row < n_rows:
            claimed = i32(0)
            if lane == 0:
                claimed = i32(atomic_add_relaxed_gpu_i32(word.g(inbox.ep_counters, 0), i32(1)))
            row = i32(warp_broadcast_i32(claimed, 0))
            if row < n_rows:
                place = message.at(send_buf_p, i32(first + row))
                there = RowPlace(row, i32(0), row, i32(0))
                decode(place, of_handler(out.format_handler), there, 0, 1, lane)    # part 0 of 1
                if lane < 2:
                    out.src_info[row, lane] = -1
        return True

    @device_fn
    def claim_tile(inbox, local_expert):
        """Claims the next tile of this expert that no block has, for all threads of the block."""
        claimed = shared_array(1, int32)
        syncthreads()                           # all threads have read the tile before
        if thread_idx() == 0:
            claimed[0] = i32(atomic_add_relaxed_gpu_i32(word.c(inbox.ep_counters, local_expert), i32(1)))
        syncthreads()
        return i32(claimed[0])

    @device_fn
    def put_routed(out, inbox, local_expert, j):
        """A warp decodes row j of a local expert. The expert's rows are counted over ascending src_ranks."""
        src_rank, before = i32(0), i32(0)
        end = i32(load_i32(word.b(inbox.ep_counters, i32(local_expert * ranks))))
        while end <= j:
            src_rank, before = i32(src_rank + 1), end
            end = i32(load_i32(word.b(inbox.ep_counters, i32(local_expert * ranks + src_rank))))
        slot = i32(j - before)
        place = message.at(inbox.recv_buf_p, u64(local_expert * ranks + src_rank) * u64(slots) + u64(slot))
        group, lane = i32(front + local_expert), i32(lane_id())
        start = i32(out.row_offsets[group])
        row = i32(start + j)
        there = RowPlace(row, group, j, tiles_before(out.format_handler, group, start))
        decode(place, of_handler(out.format_handler), there, 0, 1, lane)    # part 0 of 1
        if lane == 0:
            out.src_info[row, 0] = message.token(place)
            out.src_info[row, 1] = message.k_of(place, i32(inbox.my_rank * local + local_expert))

    @device_fn
    def put_tiles(out, inbox):
        step = i32(0)
        while step < local:
            local_expert = i32((block_idx() + step) % local)
            n_rows = rows_of(inbox, local_expert)
            tile = i32(0)
            if n_rows > 0:
                tile = claim_tile(inbox, local_expert)
            while tile * TILE_ROWS < n_rows:
                j = i32(tile * TILE_ROWS + warp_id())
                while j < n_rows and j < (tile + 1) * TILE_ROWS:
                    put_routed(out, inbox, local_expert, j)
                    j = i32(j + n_warps())
                tile = claim_tile(inbox, local_expert)
            step = i32(step + 1)

    @device_fn
    def fill_rest(out, inbox, n_shared):
        group, lane = i32(block_idx() + grid_dim() * warp_id()), i32(lane_id())
        while group < groups:
            n_rows = i32(n_shared)
            if group >= front:
                n_rows = rows_of(inbox, i32(group - front))
            start = i32(out.row_offsets[group])
            finish_group(of_handler(out.format_handler), n_rows, tiles_before(out.format_handler, group, start), lane)
            row = i32(start + n_rows + lane)        # fewer than 32 rows are padding
            if row < i32(out.row_offsets[group + 1]):
                out.src_info[row, 0] = -1
                out.src_info[row, 1] = -1
            group = i32(group + grid_dim() * n_warps())

    @device_fn
    def clear_counters(inbox):
        syncthreads()                           # the whole block is done
        is_last = False
        if thread_idx() == 0:
            is_last = atomic_add_acq_rel_gpu_i32(word.d(inbox.ep_counters, 0), i32(1)) == grid_dim() - 1
        if not syncthreads_or(is_last):
            return
        i = i32(thread_idx())
        while i < word.n_async:
            store_i32(word.reserved(inbox.ep_counters, i), i32(0))
            i = i32(i + block_dim())
        if thread_idx() == 0:
            store_i32(word.d(inbox.ep_counters, 0), i32(0))
            store_i32(word.e(inbox.ep_counters, 0), i32(0))
            store_i32(word.f(inbox.ep_counters, 0), i32(0))
            store_i32(word.g(inbox.ep_counters, 0), i32(0))

    @device_fn
    def rows(out, inbox, send_buf_p, num_tokens, waiter):
        _, n_shared = share(num_tokens, inbox.my_rank)
        if block_idx() == 0 and await_signals(inbox, waiter):
            number_rows(out, inbox, n_shared)
        if await_rows(inbox, waiter) and put_shared(out, inbox, send_buf_p, num_tokens, waiter):
            put_tiles(out, inbox)
            fill_rest(out, inbox, n_shared)
            clear_counters(inbox)

    return namespace("receive", rows=rows)


def tiles_of(fmt):
    """Device function (format_handler, group, start): the first 128-row tile of a group that starts at row `start`."""
    if "scales_offset" not in fmt.output_fields:
        return device_fn(lambda handler, group, start: i32(0))
    return device_fn(lambda handler, group, start: i32(i32(handler.scales_offset[group]) + start // SCALE_ROWS))


def handler_words(fmt, i=0):
    """Device function (format_handler) -> `out` as the format takes it: the arrays' addresses, capacity in rows."""
    if i == len(fmt.output_fields):
        return device_fn(lambda handler: (u64(handler[0].shape[0]),))
    others = handler_words(fmt, i + 1)
    return device_fn(lambda handler: (u64(address_of(handler[i])), *others(handler)))
