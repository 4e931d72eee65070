"""Checks every row of dispatch: its pair belongs there and arrived once, and all its bytes are right.

The same pass makes the experts' outputs for combine. y is x with the bits of mask(expert) flipped. x is the row from
dispatch or, for formats that round, the token itself.
"""

from functools import lru_cache

from epmoe.device import (
    atomic_or_relaxed_gpu_u32,
    block_idx,
    device_fn,
    grid_dim,
    i32,
    kernel,
    lane_id,
    load16,
    load_i32,
    load_u64,
    n_warps,
    store16,
    u32,
    u64,
    warp_broadcast_i32,
    warp_id,
)
from epmoe.soak import arrays, hashing
from epmoe.soak import segments as segments_of
from epmoe.soak.errors import NOT_A_TOKEN, PADDING, PAYLOAD, TWICE, WRONG_PLACE, record

THREADS = 256


@lru_cache
def rows_kernel(cfg, seed):
    """Kernel (params, round, my_rank): checks the rows of output_tokens and writes y."""
    block, of = arrays.parameter_block(cfg), hashing.make(cfg, seed, device_fn)
    tokens, token_key, expert_of, word, mask = of.tokens, of.token_key, of.expert, of.word, of.mask
    names = ("starts", "counts", "seen", "src_info", "output_tokens", "y", "errors")
    p_starts, p_counts, p_seen, p_src_info, p_out, p_y, p_errors = (block.offset(name) for name in names)
    ranks, most, top_k, local = cfg.n_ranks, cfg.max_tokens_per_rank, cfg.top_k, cfg.n_local_experts
    segments, row_bytes, n_vectors = local * ranks, 2 * cfg.hidden, cfg.hidden // 8
    encoded, segment_of = arrays.is_encoded(cfg), segments_of.finder(cfg)
    p_tokens = block.offset("tokens") if encoded else 0

    @device_fn
    def check_pair(params, number, row, src_rank, expert, token, k):
        """Whether (token, k) of src_rank is a pair of this expert that arrived nowhere else. Run by one lane."""
        errors, n = load_u64(params + u64(p_errors)), i32(tokens(number, src_rank))
        if token < 0 or token >= n:
            record(errors, number, i32(NOT_A_TOKEN), row, i32(0), u32(n), u32(token))
            return i32(0)
        if k < 0 or k >= top_k:
            record(errors, number, i32(NOT_A_TOKEN), row, i32(1), u32(top_k), u32(k))
            return i32(0)
        selected = i32(expert_of(number, u32(token_key(number, src_rank, token)), k))
        if selected != expert:
            record(errors, number, i32(WRONG_PLACE), row, k, u32(selected), u32(expert))
        pair = i32((src_rank * most + token) * top_k + k)
        bit = u32(u32(1) << u32(pair % 32))
        before = u32(atomic_or_relaxed_gpu_u32(load_u64(params + u64(p_seen)) + u64(4) * u64(pair // 32), bit))
        if u32(before & bit) != u32(0):
            record(errors, number, i32(TWICE), row, token, u32(0), u32(1))
        return i32(1)

    @device_fn
    def check_word(errors, number, row, element, expected, seen):
        if expected != seen:
            record(errors, number, i32(PAYLOAD), row, element, expected, seen)

    @device_fn
    def check_payload(params, number, row, key, flipped, lane):
        errors, at = load_u64(params + u64(p_errors)), u64(row) * u64(row_bytes)
        out, y = u64(load_u64(params + u64(p_out)) + at), u64(load_u64(params + u64(p_y)) + at)
        v = lane
        while v < n_vectors:
            a, b = u32(word(key, i32(4 * v))), u32(word(key, i32(4 * v + 1)))
            c, d = u32(word(key, i32(4 * v + 2))), u32(word(key, i32(4 * v + 3)))
            if encoded:  # encoding.py compares; it needs the tokens
                store16(u64(load_u64(params + u64(p_tokens)) + at) + u64(16) * u64(v), a, b, c, d)
            else:
                q = load16(out + u64(16) * u64(v))
                check_word(errors, number, row, i32(8 * v), a, u32(q[0]))
                check_word(errors, number, row, i32(8 * v + 2), b, u32(q[1]))
                check_word(errors, number, row, i32(8 * v + 4), c, u32(q[2]))
                check_word(errors, number, row, i32(8 * v + 6), d, u32(q[3]))
                a, b, c, d = u32(q[0]), u32(q[1]), u32(q[2]), u32(q[3])
            store16(y + u64(16) * u64(v), u32(a ^ flipped), u32(b ^ flipped), u32(c ^ flipped), u32(d ^ flipped))
            v = i32(v + 32)

    @device_fn
    def check_padding(params, number, row, lane):
        if lane < 2:
            seen = i32(load_i32(load_u64(params + u64(p_src_info)) + u64(4) * u64(2 * row + lane)))
            if seen != -1:
                record(load_u64(params + u64(p_errors)), number, i32(PADDING), row, lane, u32(i32(-1)), u32(seen))

    @device_fn
    def check_row(params, number, my_rank, row, lane):
        starts, src_info = load_u64(params + u64(p_starts)), load_u64(params + u64(p_src_info))
        i = i32(segment_of(starts, row))
        n = i32(load_i32(load_u64(params + u64(p_counts)) + u64(4) * u64(i)))
        if row - load_i32(starts + u64(4) * u64(i)) >= n:
            check_padding(params, number, row, lane)
        else:
            expert, src_rank = i32(my_rank * local + i // ranks), i32(i % ranks)
            token = i32(load_i32(src_info + u64(8) * u64(row)))
            good = i32(0)
            if lane == 0:
                k = i32(load_i32(src_info + u64(8) * u64(row) + u64(4)))
                good = i32(check_pair(params, number, row, src_rank, expert, token, k))
            if i32(warp_broadcast_i32(good, i32(0))) != 0:
                key = u32(token_key(number, src_rank, token))
                check_payload(params, number, row, key, u32(mask(expert)), lane)

    @kernel(max_threads=THREADS)
    def rows(params, number, my_rank):
        n_rows = i32(load_i32(load_u64(params + u64(p_starts)) + u64(4 * segments)))
        row = i32(warp_id() * grid_dim() + block_idx())
        while row < n_rows:
            check_row(params, number, my_rank, row, i32(lane_id()))
            row = i32(row + n_warps() * grid_dim())

    return rows
