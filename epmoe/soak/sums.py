"""Checks every byte of combine. Computes the weighted sum of a token's expert outputs again, from the hashes."""

from functools import lru_cache

from epmoe.device import (
    bf16_hi,
    bf16_lo,
    block_idx,
    device_fn,
    f32,
    fma_rn,
    grid_dim,
    i32,
    kernel,
    lane_id,
    load_u32,
    load_u64,
    n_warps,
    pack_bf16x2,
    shfl_idx,
    store_u64,
    u32,
    u32_as_f32,
    u64,
    warp_id,
)
from epmoe.soak import arrays, hashing
from epmoe.soak.errors import COMBINED, SUM, record

THREADS = 256


@lru_cache
def sums_kernel(cfg, seed):
    """Kernel (params, round, my_rank): checks the rank's combined tokens, two columns a lane."""
    block, of = arrays.parameter_block(cfg), hashing.make(cfg, seed, device_fn)
    tokens, token_key, expert_of = of.tokens, of.token_key, of.expert
    weight, word, mask = of.weight, of.word, of.mask
    p_combined, p_errors = block.offset("combined"), block.offset("errors")
    top_k, row_bytes, n_words = cfg.top_k, 2 * cfg.hidden, cfg.hidden // 2

    @device_fn
    def expected_word(x, expert, flipped, w):
        """fma(w, y, sum) over k ascending from +0.0, rounded once a step. The two sums are rounded to bf16."""
        low, high, k = f32(0), f32(0), i32(0)
        while k < top_k:
            y = u32(x ^ u32(shfl_idx(flipped, k)))
            w_k = f32(u32_as_f32(u32(shfl_idx(w, k))))
            if shfl_idx(expert, k) >= 0:
                low, high = f32(fma_rn(w_k, bf16_lo(y), low)), f32(fma_rn(w_k, bf16_hi(y), high))
            k = i32(k + 1)
        return u32(pack_bf16x2(low, high))

    @kernel(max_threads=THREADS)
    def sums(params, number, my_rank):
        combined, errors = load_u64(params + u64(p_combined)), load_u64(params + u64(p_errors))
        n, lane = i32(tokens(number, my_rank)), i32(lane_id())
        token = i32(warp_id() * grid_dim() + block_idx())
        if token == 0 and lane == 0:
            tally = errors + u64(4 * COMBINED)
            store_u64(tally, u64(load_u64(tally) + u64(n)))
        while token < n:
            key = u32(token_key(number, my_rank, token))
            expert, flipped, w = i32(-1), u32(0), u32(0)
            if lane < top_k:  # lane k has the token's k-th id
                expert = i32(expert_of(number, key, lane))
                flipped, w = u32(mask(expert)), u32(weight(number, key, lane))
            run = i32(0)
            while run < n_words:
                # lanes past the last column repeat it and check nothing, because all lanes must take part in shuffles
                i = i32(min(run + lane, n_words - 1))
                expected = expected_word(u32(word(key, i)), expert, flipped, w)
                seen = u32(load_u32(combined + u64(token) * u64(row_bytes) + u64(4) * u64(i)))
                if run + lane < n_words and expected != seen:
                    record(errors, number, i32(SUM), token, i32(2 * i), expected, seen)
                run = i32(run + 32)
            token = i32(token + n_warps() * grid_dim())

    return sums
