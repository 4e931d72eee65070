"""The reducing blocks of combine_wait: per token the weighted sum of its rows, or the rows as they are."""

from epmoe import layout
from epmoe.device import (block_dim, block_idx, device_fn, f32, grid_dim, i32, lane_id, load16, load_f32, load_u64,
                          n_warps, prefetch, shfl_idx, store16, syncthreads_or, thread_idx, u32, u64, warp_id)
from epmoe.layout import MAX_FINITE

from . import elements, ids, shared_expert, stamps, user_functions
from .spin import wait_for_signal
from .status import COMBINE_WAIT

VECTOR = 16         # bytes


def make(cfg, block, mark, leave, router_weights, weights_types, epilogue, epilogue_types):
    """Device function reduce(params, num_tokens, my_rank, failed) -> whether it had to give up; for all blocks.

    A block waits until all rows of the round are here; then one warp takes a run of columns of one token. failed:
    whether this thread knows of an earlier wait that expired.

    leave: a device function params, called by all threads when the block has seen every signal, and needs no counter.
    router_weights: "array", a function (token, k, *args), or None for output [num_tokens, top_k, hidden].
    epilogue: a function (token, col, value, *args), or None.
    """
    numbers, id_words = elements.make(cfg.combine_dtype), ids.make(cfg)
    zeros, unpack, pack, accumulate, add = numbers.zeros, numbers.unpack, numbers.pack, numbers.accumulate, numbers.add
    load_id, clean_id, share = id_words.load, id_words.clean, shared_expert.share_of(cfg)
    top_k, local, keeps_own, fused_share = cfg.top_k, cfg.n_local_experts, cfg.skip_a2a, cfg.fused_shared_expert
    bytes_a_row, numbers_a_vector = layout.combine_msg_bytes(cfg), numbers.n
    n_vectors = bytes_a_row // VECTOR
    n_runs = (n_vectors + 31) // 32                     # a run: one vector a lane
    n_entries = cfg.n_local_experts * cfg.n_src_ranks
    p_count, p_status, p_timeout = block.offset("recv_count_p"), block.offset("status"), block.offset("timeout_ns")
    p_recv, p_out, p_topk = block.offset("recv_buf_p"), block.offset("output_tokens"), block.offset("topk_ids")
    p_weights, p_rows = block.offset("router_weights"), block.offset("input_tokens")
    tail = 8 * block.n_words
    weights_words = user_functions.reader(weights_types, tail)
    epilogue_words = user_functions.reader(epilogue_types, tail + 8 * user_functions.words_of(weights_types))
    has_epilogue, weights_are_array = epilogue is not None, router_weights == "array"
    weight_of = user_functions.bound(router_weights, weights_types) if callable(router_weights) else None
    apply_epilogue = numbers.each(user_functions.bound(epilogue, epilogue_types)) if has_epilogue else None

    @device_fn
    def expert_of(params, token, my_rank, lane):
        """The expert whose row lies in slot `lane` of the token's place in recv_buf; -1 if none does."""
        expert = clean_id(load_id(u64(load_u64(params + u64(p_topk))), token, lane), i32(0), lane)
        if keeps_own:
            if expert >= 0 and expert // local != my_rank:
                expert = i32(-1)
        return expert

    @device_fn
    def weight(params, token, lane):
        """The router weight of slot `lane`."""
        value = f32(0)
        if lane < top_k:
            if weights_are_array:
                value = f32(load_f32(u64(load_u64(params + u64(p_weights))) + u64(4) * u64(token * top_k + lane)))
            else:
                value = f32(weight_of((token, lane), weights_words(params)))
        return value

    @device_fn
    def load_slot(places, k, expert, at_vector):
        """The vector of slot k; zeros, and no access to its stale bytes, where the slot has no expert."""
        q = (u32(0), u32(0), u32(0), u32(0))
        if k < top_k:
            if shfl_idx(expert, i32(k & 31)) >= 0:
                q = load16(places + u64(k) * u64(bytes_a_row) + at_vector)
        return q

    @device_fn
    def add_slot(w, k, expert, q, sums):
        # a slot without an expert adds nothing, whatever its weight
        if k < top_k:
            w_k = f32(shfl_idx(w, i32(k & 31)))
            if shfl_idx(expert, i32(k & 31)) >= 0:
                sums = accumulate(w_k, q, sums)
        return sums

    @device_fn
    def add_four(places, k, at_vector, expert, w, sums):
        a, b = load_slot(places, k, expert, at_vector), load_slot(places, i32(k + 1), expert, at_vector)  # all in flight
        c, d = load_slot(places, i32(k + 2), expert, at_vector), load_slot(places, i32(k + 3), expert, at_vector)
        sums = add_slot(w, i32(k + 1), expert, b, add_slot(w, k, expert, a, sums))
        return add_slot(w, i32(k + 3), expert, d, add_slot(w, i32(k + 2), expert, c, sums))

    @device_fn
    def weighted_sum(params, token, vector, my_rank, expert, w):
        """fma(w, x, sum) over k ascending from +0.0, for this lane's vector of columns."""
        places = u64(load_u64(params + u64(p_recv))) + u64(token * top_k) * u64(bytes_a_row)
        at_vector = u64(VECTOR) * u64(vector)
        sums, k = zeros(), i32(0)
        while k < top_k:
            sums = add_four(places, k, at_vector, expert, w, sums)
            k = i32(k + 4)
        return pack(sums)

    @device_fn
    def add_shared_expert(params, token, vector, n_share, first, q):
        """Plus the shared expert's output, row token - first of its share; plus 0 for other ranks' tokens."""
        row = (u32(0), u32(0), u32(0), u32(0))
        if token >= first and token < first + n_share:
            row = load16(u64(load_u64(params + u64(p_rows))) + u64(token - first) * u64(bytes_a_row)
                         + u64(VECTOR) * u64(vector))
        return pack(add(unpack(q), row))

    @device_fn
    def reduce_weighted(params, num_tokens, my_rank):
        lane, out = i32(lane_id()), u64(load_u64(params + u64(p_out)))
        n_share, first = share(num_tokens, my_rank)
        words = epilogue_words(params)
        unit = i32(warp_id() * grid_dim() + block_idx())
        while unit < num_tokens * n_runs:
            token, run = i32(unit // n_runs), i32(unit % n_runs)
            expert, w = expert_of(params, token, my_rank, lane), weight(params, token, lane)
            # lanes behind the last column do it again and store nothing: all stay together for the shuffles
            vector = i32(min(run * 32 + lane, n_vectors - 1))
            q = weighted_sum(params, token, vector, my_rank, expert, w)
            if fused_share:
                q = add_shared_expert(params, token, vector, n_share, first, q)
            if has_epilogue:
                q = pack(apply_epilogue(token, i32(vector * numbers_a_vector), unpack(q), words))
            if run * 32 + lane < n_vectors:
                store16(out + u64(token) * u64(bytes_a_row) + u64(VECTOR) * u64(vector), q[0], q[1], q[2], q[3])
            unit = i32(unit + n_warps() * grid_dim())

    @device_fn
    def keep_rows(params, num_tokens, my_rank):
        lane, out, recv = i32(lane_id()), u64(load_u64(params + u64(p_out))), u64(load_u64(params + u64(p_recv)))
        unit = i32(warp_id() * grid_dim() + block_idx())
        while unit < num_tokens * n_runs:
            token, vector = i32(unit // n_runs), i32(unit % n_runs * 32 + lane)
            expert, k = expert_of(params, token, my_rank, lane), i32(0)
            while k < top_k:
                has_row = shfl_idx(expert, k) >= 0
                if vector < n_vectors:
                    place = u64(token * top_k + k) * u64(bytes_a_row) + u64(VECTOR) * u64(vector)
                    q = (u32(0), u32(0), u32(0), u32(0))
                    if has_row:
                        q = load16(recv + place)
                    store16(out + place, q[0], q[1], q[2], q[3])
                k = i32(k + 1)
            unit = i32(unit + n_warps() * grid_dim())

    reduce_tokens = keep_rows if router_weights is None else reduce_weighted

    @device_fn
    def await_rows(params):
        """Waits for every signal of the round; a thread takes some. Whether all came."""
        status, timeout_ns = u64(load_u64(params + u64(p_status))), u64(load_u64(params + u64(p_timeout)))
        recv_count = u64(load_u64(params + u64(p_count)))
        ok, i = True, i32(thread_idx())
        while ok and i < n_entries:
            ok = wait_for_signal(recv_count + u64(8) * u64(i), status, timeout_ns, COMBINE_WAIT, i) != u64(MAX_FINITE)
            i = i32(i + block_dim())
        return ok

    @device_fn
    def fetch_ids(params, token, num_tokens):
        """Asks for ids and weights of a warp's first token, while it waits for the rows."""
        if token < num_tokens and lane_id() < top_k:
            at = u64(4) * u64(token * top_k + lane_id())
            prefetch(u64(load_u64(params + u64(p_topk))) + at)
            if weights_are_array:
                prefetch(u64(load_u64(params + u64(p_weights))) + at)

    @device_fn
    def reduce(params, num_tokens, my_rank, failed):
        fetch_ids(params, i32((warp_id() * grid_dim() + block_idx()) // n_runs), num_tokens)
        ok = not failed
        ok = ok and await_rows(params)
        if syncthreads_or(not ok):                      # every thread acquired for all
            return True
        mark(params, stamps.ARRIVED)
        leave(params)                                   # no counter and no signal is looked at from here on
        reduce_tokens(params, num_tokens, my_rank)
        mark(params, stamps.REDUCED)
        return False

    return reduce
