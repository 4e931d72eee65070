"""The reducing part of combine_wait: the weighted sum of each token's rows, or the rows themselves.

A warp takes a run of columns of one token. It loads the rows' vectors into registers as they arrive, in any order, and
sums them when it has all of them. So little work remains when the last row of the round arrives.
"""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import (ballot, block_idx, device_fn, f32, grid_dim, i32, lane_id, load16, load_f32, n_warps, shfl_idx, store16, u32, u64, warp_id)

from . import elements, ids, shared_expert, stamps, user_functions

VECTOR = 16         # bytes
AT_ONCE = 8         # slots whose vectors a lane holds


class Taking(NamedTuple):
    """Device functions by which a warp waits for a token's rows, a bit of `wanted` for each slot that has one.

    eight(params, flags, entry, wanted, first, place, is_own) -> (eight vectors, whether they came): a lane's vectors of
        slots first .. first + 7; entry: on lane k the word of recv_count that signals slot k; place: of slot 0's
        vector; is_own: whether this vector is the lane's own, and not one that it looks at with another lane.
    rows(flags, entry, wanted) -> whether all came. flags: of watchers.py; 0 where there are none.
    """

    eight: callable
    rows: callable


def behind_signals(cfg, next_come) -> Taking:
    """Rows are loaded when their signals have arrived. next_come: of watchers.py."""
    top_k, bytes_a_row = cfg.top_k, layout.combine_msg_bytes(cfg)

    @device_fn
    def await_rows(flags, entry, wanted):
        came = u32(0xFFFFFFFF)
        while wanted != u32(0) and came != u32(0):
            came = next_come(flags, entry, wanted)
            wanted = u32(wanted & ~came)
        return came != u32(0)

    def taker(j):
        """Device function for slot first + j: its vector if it is among those that came."""
        @device_fn
        def take(came, first, q, place):
            if j < top_k:
                if ((came >> u32(first + j)) & u32(1)) != u32(0):
                    q = load16(place + u64(first + j) * u64(bytes_a_row))
            return q

        return take

    take0, take1, take2, take3, take4, take5, take6, take7 = (taker(j) for j in range(AT_ONCE))

    @device_fn
    def take_eight(params, flags, entry, wanted, first, place, is_own):
        none = (u32(0), u32(0), u32(0), u32(0))
        q0, q1, q2, q3, q4, q5, q6, q7 = none, none, none, none, none, none, none, none
        wanted, came = u32(wanted & u32(u32((1 << AT_ONCE) - 1) << u32(first))), u32(1)
        while wanted != u32(0) and came != u32(0):
            came = u32(next_come(flags, entry, wanted))
            q0, q1, q2 = take0(came, first, q0, place), take1(came, first, q1, place), take2(came, first, q2, place)
            q3, q4, q5 = take3(came, first, q3, place), take4(came, first, q4, place), take5(came, first, q5, place)
            q6, q7 = take6(came, first, q6, place), take7(came, first, q7, place)
            wanted = u32(wanted & ~came)
        return q0, q1, q2, q3, q4, q5, q6, q7, came != u32(0)

    return Taking(take_eight, await_rows)


def make(cfg, block, mark, taking, router_weights, weights_types, epilogue, epilogue_types):
    """Device function reduce(params, flags, num_tokens, my_rank), for all warps of all blocks.

    Tokens whose rows do not come, because the round has failed, are left alone. taking: a Taking; flags: what it takes.
    router_weights: "array", a function (token, k, *args), or None for output [num_tokens, top_k, hidden].
    epilogue: a function (token, col, value, *args), an OutputLambda, or None.
    """
    numbers, id_words = elements.make(cfg.combine_dtype), ids.make(cfg)
    take_eight, await_rows = taking
    zeros, unpack, pack, accumulate, add = numbers.zeros, numbers.unpack, numbers.pack, numbers.accumulate, numbers.add
    load_id, clean_id, share = id_words.load, id_words.clean, shared_expert.share_of(cfg)
    top_k, local, n_ranks = cfg.top_k, cfg.n_local_experts, cfg.n_src_ranks
    keeps_own, fused_share = cfg.skip_a2a, cfg.fused_shared_expert
    bytes_a_row, numbers_a_vector = layout.combine_msg_bytes(cfg), numbers.n
    n_vectors = bytes_a_row // VECTOR
    n_runs = (n_vectors + 31) // 32                     # a run: one vector a lane
    p_recv, p_out, p_topk = block.index("recv_buf_p"), block.index("output_tokens"), block.index("topk_ids")
    p_weights, p_rows = block.index("router_weights"), block.index("input_tokens")
    tail = block.n_words
    weights_words = user_functions.reader(weights_types, tail)
    epilogue_words = user_functions.reader(epilogue_types, tail + user_functions.words_of(weights_types))
    has_epilogue, weights_are_array = epilogue is not None, router_weights == "array"
    stores_itself = isinstance(epilogue, user_functions.OutputLambda)
    weight_of = (user_functions.bound(router_weights, weights_types, "router_weights") if callable(router_weights)
                 else None)
    apply_epilogue = (numbers.each(user_functions.bound(
        epilogue, epilogue_types, "elementwise_lambda_fn" if stores_itself else "epilogue")) if has_epilogue else None)

    @device_fn
    def expert_of(params, token, my_rank, lane):
        """The expert whose row lies in slot `lane` of the token's place in recv_buf; -1 if none does."""
        expert = clean_id(load_id(params[p_topk], token, lane), i32(0), lane)
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
                value = f32(load_f32(params[p_weights] + u64(4) * u64(token * top_k + lane)))
            else:
                value = f32(weight_of((token, lane), weights_words(params)))
        return value

    @device_fn
    def entry_of(expert, my_rank):
        """The word of recv_count by which a row of this expert is signalled."""
        source = i32(expert // local)
        if keeps_own:
            source = i32(0)
        return i32(expert % local * n_ranks + source)

    def adder(j):
        """Device function for slot first + j: its part of the sum."""
        @device_fn
        def add_to(sums, has_row, first, w, q):
            # a slot without an expert adds nothing, whatever its weight
            if j < top_k:
                w_k = f32(shfl_idx(w, i32((first + j) & 31)))
                if ((has_row >> u32((first + j) & 31)) & u32(1)) != u32(0):
                    sums = accumulate(w_k, q, sums)
            return sums

        return add_to

    add0, add1, add2, add3, add4, add5, add6, add7 = (adder(j) for j in range(AT_ONCE))

    @device_fn
    def sum_eight(params, place, is_own, flags, entry, has_row, first, w, sums):
        """Adds k = first .. first + 7 to the sums; (sums, whether their rows arrived)."""
        q0, q1, q2, q3, q4, q5, q6, q7, came = take_eight(params, flags, entry, has_row, first, place, is_own)
        sums = add1(add0(sums, has_row, first, w, q0), has_row, first, w, q1)
        sums = add3(add2(sums, has_row, first, w, q2), has_row, first, w, q3)
        sums = add5(add4(sums, has_row, first, w, q4), has_row, first, w, q5)
        return add7(add6(sums, has_row, first, w, q6), has_row, first, w, q7), came

    @device_fn
    def sum_slots(params, place, is_own, flags, entry, has_row, w):
        """fma(w, x, sum) over k ascending from +0.0; (sums, whether all rows arrived)."""
        sums, goes_on, first = zeros(), True, i32(0)
        while goes_on and first < top_k:
            sums, goes_on = sum_eight(params, place, is_own, flags, entry, has_row, first, w, sums)
            first = i32(first + AT_ONCE)
        return sums, goes_on

    @device_fn
    def add_shared_expert(params, token, vector, n_share, first, q):
        """Plus the shared expert's output, row token - first of its share; plus 0 for other ranks' tokens."""
        row = (u32(0), u32(0), u32(0), u32(0))
        if token >= first and token < first + n_share:
            row = load16(params[p_rows] + u64(token - first) * u64(bytes_a_row)
                         + u64(VECTOR) * u64(vector))
        return pack(add(unpack(q), row))

    @device_fn
    def reduce_weighted(params, flags, num_tokens, my_rank):
        lane, out, recv = i32(lane_id()), params[p_out], params[p_recv]
        n_share, first = share(num_tokens, my_rank)
        words = epilogue_words(params)
        unit, goes_on = i32(warp_id() * grid_dim() + block_idx()), True
        while goes_on and unit < num_tokens * n_runs:
            token, run = i32(unit // n_runs), i32(unit % n_runs)
            expert, w = expert_of(params, token, my_rank, lane), weight(params, token, lane)
            # lanes behind the last column do it again and store nothing: all stay together for the shuffles
            vector = i32(min(run * 32 + lane, n_vectors - 1))
            place = recv + u64(token * top_k) * u64(bytes_a_row) + u64(VECTOR) * u64(vector)
            has_row, entry = u32(ballot(expert >= 0)), entry_of(expert, my_rank)
            is_own = run * 32 + lane < n_vectors
            sums, goes_on = sum_slots(params, place, is_own, flags, entry, has_row, w)
            q = pack(sums)
            if fused_share:
                q = add_shared_expert(params, token, vector, n_share, first, q)
            if has_epilogue and not stores_itself:
                q = pack(apply_epilogue(token, i32(vector * numbers_a_vector), unpack(q), words))
            if goes_on and is_own:
                if stores_itself:
                    apply_epilogue(token, i32(vector * numbers_a_vector), unpack(q), words)
                else:
                    store16(out + u64(token) * u64(bytes_a_row) + u64(VECTOR) * u64(vector), q[0], q[1], q[2], q[3])
            if unit < grid_dim():
                mark(params, stamps.ARRIVED)            # thread 0: its first token
            unit = i32(unit + n_warps() * grid_dim())

    @device_fn
    def keep_rows(params, flags, num_tokens, my_rank):
        lane, out, recv = i32(lane_id()), params[p_out], params[p_recv]
        unit, goes_on = i32(warp_id() * grid_dim() + block_idx()), True
        while goes_on and unit < num_tokens * n_runs:
            token, vector = i32(unit // n_runs), i32(unit % n_runs * 32 + lane)
            expert = expert_of(params, token, my_rank, lane)
            has_row, k = u32(ballot(expert >= 0)), i32(0)
            goes_on = await_rows(flags, entry_of(expert, my_rank), has_row)
            if unit < grid_dim():
                mark(params, stamps.ARRIVED)
            while goes_on and k < top_k:
                if vector < n_vectors:
                    at_vector = u64(token * top_k + k) * u64(bytes_a_row) + u64(VECTOR) * u64(vector)
                    q = (u32(0), u32(0), u32(0), u32(0))
                    if ((has_row >> u32(k)) & u32(1)) != u32(0):
                        q = load16(recv + at_vector)
                    store16(out + at_vector, q[0], q[1], q[2], q[3])
                k = i32(k + 1)
            unit = i32(unit + n_warps() * grid_dim())

    reduce_tokens = keep_rows if router_weights is None else reduce_weighted

    @device_fn
    def reduce(params, flags, num_tokens, my_rank):
        reduce_tokens(params, flags, num_tokens, my_rank)
        if block_idx() >= num_tokens * n_runs:
            mark(params, stamps.ARRIVED)                # thread 0 had no token to wait for
        mark(params, stamps.REDUCED)

    return reduce
