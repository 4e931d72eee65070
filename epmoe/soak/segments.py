"""Compares row_offsets, expert_ids and recv_count with the rows that each (expert, src_rank) segment must have."""

from functools import lru_cache

from epmoe.device import (
    atomic_add_relaxed_gpu_i32,
    block_dim,
    block_idx,
    device_fn,
    grid_dim,
    i32,
    kernel,
    lane_id,
    load_i32,
    load_u64,
    shfl_idx,
    store_i32,
    store_u64,
    thread_idx,
    u32,
    u64,
    warp_inclusive_sum_i32,
)
from epmoe.kernels import formats
from epmoe.soak import arrays, hashing
from epmoe.soak.errors import EXPERT_IDS, RECV_COUNT, ROW_OFFSETS, ROWS, record

THREADS = 256
WARP = 32


@lru_cache
def finder(cfg):
    """Device function (starts, row) -> the last segment that begins at or before this row.

    The row is in that segment, or it is padding after it.
    """
    segments = cfg.n_local_experts * cfg.n_ranks

    @device_fn
    def segment_of(starts, row):
        low, high = i32(0), i32(segments)
        while high - low > 1:
            middle = i32((low + high) // 2)
            if load_i32(starts + u64(4) * u64(middle)) <= row:
                low = middle
            else:
                high = middle
        return low

    return segment_of


@lru_cache
def count_kernel(cfg, seed):
    """Kernel (params, round, my_rank): adds up in `counts` how many pairs every rank's routing sends to this rank."""
    block, of = arrays.parameter_block(cfg), hashing.make(cfg, seed, device_fn)
    tokens, token_key, expert, p_counts = of.tokens, of.token_key, of.expert, block.offset("counts")
    ranks, most, top_k, local = cfg.n_ranks, cfg.max_tokens_per_rank, cfg.top_k, cfg.n_local_experts
    pairs = ranks * most * top_k

    @kernel(max_threads=THREADS)
    def count(params, number, my_rank):
        counts = load_u64(params + u64(p_counts))
        i = i32(block_idx() * block_dim() + thread_idx())
        while i < pairs:
            src_rank, token, k = i32(i // (most * top_k)), i32(i // top_k % most), i32(i % top_k)
            if token < tokens(number, src_rank):
                chosen = i32(expert(number, u32(token_key(number, src_rank, token)), k) - my_rank * local)
                if chosen >= 0 and chosen < local:
                    atomic_add_relaxed_gpu_i32(counts + u64(4) * u64(chosen * ranks + src_rank), i32(1))
            i = i32(i + grid_dim() * block_dim())

    return count


@lru_cache
def segments_kernel(cfg):
    """Kernel (params, round, my_rank), one warp: computes `starts` of all segments, compares dispatch's results."""
    block = arrays.parameter_block(cfg)
    names = ("counts", "starts", "row_offsets", "expert_ids", "recv_count", "errors")
    p_counts, p_starts, p_offsets, p_ids, p_recv, p_errors = (block.offset(name) for name in names)
    ranks, local, pad = cfg.n_ranks, cfg.n_local_experts, formats.of(cfg).pad_rows

    @device_fn
    def same(errors, number, what, place, part, expected, address):
        seen = i32(load_i32(address))
        if seen != expected:
            record(errors, number, i32(what), place, part, u32(expected), u32(seen))

    @kernel(max_threads=WARP)
    def segments(params, number, my_rank):
        counts, starts = load_u64(params + u64(p_counts)), load_u64(params + u64(p_starts))
        errors, lane = load_u64(params + u64(p_errors)), i32(lane_id())
        offsets, ids = load_u64(params + u64(p_offsets)), load_u64(params + u64(p_ids))
        base, carry = i32(0), i32(0)
        while base < local:
            expert, rows, r = i32(base + lane), i32(0), i32(0)
            if expert < local:
                while r < ranks:
                    rows = i32(rows + load_i32(counts + u64(4) * u64(expert * ranks + r)))
                    r = i32(r + 1)
            padded = i32((rows + pad - 1) // pad * pad)
            ends = i32(carry + warp_inclusive_sum_i32(padded))
            if expert < local:
                start = i32(ends - padded)
                same(errors, number, ROW_OFFSETS, expert, i32(0), start, offsets + u64(4) * u64(expert))
                same(errors, number, EXPERT_IDS, expert, i32(0), expert, ids + u64(4) * u64(expert))
                r = i32(0)
                while r < ranks:
                    place = u64(4) * u64(expert * ranks + r)
                    n = i32(load_i32(counts + place))
                    same(errors, number, RECV_COUNT, expert, r, n, load_u64(params + u64(p_recv)) + place)
                    store_i32(starts + place, start)
                    start, r = i32(start + n), i32(r + 1)
            carry = i32(shfl_idx(ends, i32(31)))
            base = i32(base + 32)
        if lane == 0:
            same(errors, number, ROW_OFFSETS, i32(local), i32(0), carry, offsets + u64(4) * u64(local))
            store_i32(starts + u64(4) * u64(local * ranks), carry)
            tally = errors + u64(4 * ROWS)
            store_u64(tally, u64(load_u64(tally) + u64(carry)))

    return segments
