"""Checks everything that dispatch returns.

Compares row_offsets, expert_ids and recv_count with the rows that each (expert, src_rank) segment must have. Then it
checks every row: its pair belongs there and arrived once, and all its bytes are right. The same pass makes the experts'
outputs for combine. y is x with the bits of mask(expert) flipped. x is the row from dispatch or, for formats that
round, the token itself.
"""

from functools import lru_cache

from epmoe.device import (
    atomic_add_relaxed_gpu_i32,
    atomic_or_relaxed_gpu_u32,
    block_dim,
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
    shfl_idx,
    store16,
    store_i32,
    store_u64,
    thread_idx,
    u32,
    u64,
    warp_broadcast_i32,
    warp_id,
    warp_inclusive_sum_i32,
)
from epmoe.kernels import formats
from epmoe.soak import arrays, hashing
from epmoe.soak.errors import (
    EXPERT_IDS,
    NOT_A_TOKEN,
    PADDING,
    PAYLOAD,
    RECV_COUNT,
    ROW_OFFSETS,
    ROWS,
    TWICE,
    WRONG_PLACE,
    record,
)

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


@lru_cache
def rows_kernel(cfg, seed):
    """Kernel (params, round, my_rank): checks the rows of output_tokens and writes y."""
    block, of = arrays.parameter_block(cfg), hashing.make(cfg, seed, device_fn)
    tokens, token_key, expert_of, word, mask = of.tokens, of.token_key, of.expert, of.word, of.mask
    names = ("starts", "counts", "seen", "src_info", "output_tokens", "y", "errors")
    p_starts, p_counts, p_seen, p_src_info, p_out, p_y, p_errors = (block.offset(name) for name in names)
    ranks, most, top_k, local = cfg.n_ranks, cfg.max_tokens_per_rank, cfg.top_k, cfg.n_local_experts
    segments, row_bytes, n_vectors = local * ranks, 2 * cfg.hidden, cfg.hidden // 8
    encoded, segment_of = arrays.is_encoded(cfg), finder(cfg)
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
