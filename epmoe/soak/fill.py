"""A kernel that writes the data a rank sends in this round, clears counts and poisons results."""

from functools import lru_cache

from epmoe.device import (
    SIM,
    block_dim,
    block_idx,
    device_fn,
    grid_dim,
    i32,
    kernel,
    lane_id,
    load_u64,
    n_warps,
    store16,
    store_i32,
    store_u32,
    thread_idx,
    u32,
    u64,
    warp_id,
)
from epmoe.host.memory_pool import UNWRITTEN
from epmoe.soak import arrays, hashing

THREADS = 256
# On a GPU a NaN in every float type. In the simulator results lie in memory that is filled already.
POISON = 0x01010101 * UNWRITTEN if SIM else 0xFFFFFFFF


@lru_cache
def fill_kernel(cfg, seed, poison):
    """Kernel (params, round, my_rank): writes this rank's tokens, ids and weights; sets counts and `seen` to zero."""
    block, of = arrays.parameter_block(cfg), hashing.make(cfg, seed, device_fn)
    tokens, token_key, expert, weight, word = of.tokens, of.token_key, of.expert, of.weight, of.word
    p_x, p_ids, p_weights = block.offset("x"), block.offset("ids"), block.offset("weights")
    p_counts, p_seen = block.offset("counts"), block.offset("seen")
    p_results, p_end = block.offset(arrays.RESULTS), block.offset("results_end")
    inputs, _ = arrays.shapes(cfg)
    n_counts, n_seen = inputs["counts"][0][0], inputs["seen"][0][0]
    top_k, row_bytes, n_vectors = cfg.top_k, 2 * cfg.hidden, cfg.hidden // 8

    @kernel(max_threads=THREADS)
    def fill(params, number, my_rank):
        x, ids = load_u64(params + u64(p_x)), load_u64(params + u64(p_ids))
        weights = load_u64(params + u64(p_weights))
        n, lane = i32(tokens(number, my_rank)), i32(lane_id())
        token = i32(warp_id() * grid_dim() + block_idx())
        while token < n:
            key = u32(token_key(number, my_rank, token))
            if lane < top_k:
                store_i32(ids + u64(4) * u64(token * top_k + lane), expert(number, key, lane))
                store_u32(weights + u64(4) * u64(token * top_k + lane), weight(number, key, lane))
            v = lane
            while v < n_vectors:
                store16(
                    x + u64(token) * u64(row_bytes) + u64(16) * u64(v),
                    word(key, i32(4 * v)),
                    word(key, i32(4 * v + 1)),
                    word(key, i32(4 * v + 2)),
                    word(key, i32(4 * v + 3)),
                )
                v = i32(v + 32)
            token = i32(token + n_warps() * grid_dim())
        me, everybody = i32(block_idx() * block_dim() + thread_idx()), i32(grid_dim() * block_dim())
        counts, seen = load_u64(params + u64(p_counts)), load_u64(params + u64(p_seen))
        i = me
        while i < n_counts:
            store_i32(counts + u64(4) * u64(i), i32(0))
            i = i32(i + everybody)
        i = me
        while i < n_seen:
            store_u32(seen + u64(4) * u64(i), u32(0))
            i = i32(i + everybody)
        if poison:
            at = u64(load_u64(params + u64(p_results)) + u64(16) * u64(me))
            end = load_u64(params + u64(p_end))
            while at < end:
                store16(at, u32(POISON), u32(POISON), u32(POISON), u32(POISON))
                at = u64(at + u64(16) * u64(everybody))

    return fill
