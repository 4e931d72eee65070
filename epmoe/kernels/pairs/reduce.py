"""The reducing part of combine, step 5: the weighted sum of each token's rows, or the rows themselves.

Rows' vectors are loaded as they arrive, in any order, and summed when all are there. So little work remains when the
last row of the round arrives.
"""

from epmoe import layout
from epmoe.device import (ballot, block_idx, device_fn, f32, grid_dim, i32, lane_id, load16, load_f32, n_warps,
                          shfl_idx, u32, u64, warp_id)

from .. import elements, ids, stamps, user_functions
from ..bits import has
from ..formats.row_copy import store_vector
from ..params import LANES, VECTOR, in_turn
from ..plain import counters
from ..plain.receive import shared_expert_share
from .await_rows import AT_ONCE, TokenRows


def make(build, take):
    """Device function reduce(call, flags), called by all warps. take: a namespace of await_rows.py, which uses `flags`.

    A warp takes a run of columns of one token: a vector a lane. A run of which a row does not come is not written.
    """
    cfg, mark = build.cfg, stamps.make(build.trace)
    token_rows, n_runs = _token_rows(cfg), -(-layout.combine_msg_bytes(cfg) // VECTOR // LANES)     # one vector a lane
    finish_run = _unreduced(build, take) if build.router_weights is None else _reduced(build, take)

    @device_fn
    def reduce(call, flags):
        unit, goes_on = i32(warp_id() * grid_dim() + block_idx()), True
        while goes_on and unit < call.num_tokens * n_runs:
            token, run = i32(unit // n_runs), i32(unit % n_runs)
            goes_on = finish_run(call, flags, token, token_rows(call, token, run))
            if unit < grid_dim():
                mark(call, stamps.ARRIVED)              # thread 0: its first token
            unit = i32(unit + n_warps() * grid_dim())
        if block_idx() >= call.num_tokens * n_runs:
            mark(call, stamps.ARRIVED)                  # thread 0 had no token to wait for
        mark(call, stamps.REDUCED)

    return reduce


def _token_rows(cfg):
    """Device function (call, token, run) -> TokenRows.

    Lanes past the last column repeat it and store nothing, since all lanes are needed for the shuffles.
    """
    of_ids, word, bytes_a_row = ids.make(cfg.n_experts, cfg.top_k), counters.words(cfg), layout.combine_msg_bytes(cfg)
    n_vectors, top_k, local, skip_a2a = bytes_a_row // VECTOR, cfg.top_k, cfg.n_local_experts, cfg.skip_a2a

    @device_fn
    def token_rows(call, token, run):
        lane = i32(lane_id())
        expert = of_ids.clean(of_ids.load(call.topk_ids, token, lane), i32(0), lane)
        owner = i32(expert // local)
        if skip_a2a and owner != call.my_rank:
            expert = i32(-1)
        vector = i32(min(run * LANES + lane, n_vectors - 1))
        place = call.recv_buf_p + u64(token * top_k) * u64(bytes_a_row) + u64(VECTOR) * u64(vector)
        segment = word.segment(i32(expert % local), owner)
        return TokenRows(u32(ballot(expert >= 0)), segment, vector, place, run * LANES + lane < n_vectors)

    return token_rows


def _weights_of(build):
    """Device function (call, token) -> the router weight at the k of this lane."""
    top_k = build.cfg.top_k
    if build.router_weights == "array":
        weight = device_fn(lambda call, token, k: f32(load_f32(call.router_weights + u64(4) * u64(token * top_k + k))))
    else:
        given = user_functions.bound(build.router_weights, build.weights_types, "router_weights")
        weight = device_fn(lambda call, token, k: given((token, k), call.router_weights_args))
    return device_fn(lambda call, token: weight(call, token, i32(lane_id())) if lane_id() < top_k else f32(0))


def _sums(build, take, vectors):
    """Device function (call, flags, rows, w) -> (fma(w, x, sum) over k ascending from +0.0, whether all arrived)."""
    top_k = build.cfg.top_k

    def adding(j):
        """Device function (sums, wanted, first, w, held) -> sums plus the term of k = first + j."""
        @device_fn
        def add(sums, wanted, first, w, held):
            # a k without an expert adds nothing, whatever its weight
            if j < top_k:
                w_k = f32(shfl_idx(w, i32((first + j) & 31)))
                if has(wanted, i32((first + j) & 31)):
                    sums = vectors.accumulate(w_k, held[j], sums)
            return sums

        return add

    add_eight = in_turn(AT_ONCE, adding)

    @device_fn
    def sum_rows(call, flags, rows, w):
        sums, goes_on, first = vectors.zeros(), True, i32(0)
        while goes_on and first < top_k:
            held, goes_on = take.eight(call, flags, rows, first)
            sums = add_eight(sums, rows.wanted, first, w, held)
            first = i32(first + AT_ONCE)
        return sums, goes_on

    return sum_rows


def _reduced(build, take):
    """Device function (call, flags, token, rows) -> whether all rows came.

    It stores the weighted sum, plus the shared expert's output, through the epilogue.
    """
    cfg, epilogue = build.cfg, build.epilogue
    vectors, weight_of, share = elements.make(cfg.combine_dtype), _weights_of(build), shared_expert_share(cfg)
    sum_rows, fused_share = _sums(build, take, vectors), cfg.fused_shared_expert
    bytes_a_row = layout.combine_msg_bytes(cfg)
    has_epilogue, stores_itself = epilogue is not None, isinstance(epilogue, user_functions.OutputLambda)
    what = "elementwise_lambda_fn" if stores_itself else "epilogue"
    applied = vectors.each(user_functions.bound(epilogue, build.epilogue_types, what)) if has_epilogue else None

    @device_fn
    def reduce_run(call, flags, token, rows):
        sums, came = sum_rows(call, flags, rows, weight_of(call, token))
        q, col, at = vectors.pack(sums), i32(rows.vector * vectors.n), u64(VECTOR) * u64(rows.vector)
        if fused_share:         # row token - first of its share; 0 is added for other ranks' tokens
            (first, n_shared), row = share(call.num_tokens, call.my_rank), (u32(0), u32(0), u32(0), u32(0))
            if token >= first and token < first + n_shared:
                row = load16(call.input_tokens + u64(token - first) * u64(bytes_a_row) + at)
            q = vectors.pack(vectors.add(vectors.unpack(q), row))
        if has_epilogue and not stores_itself:
            q = vectors.pack(applied(token, col, vectors.unpack(q), call.epilogue_args))
        if came and rows.is_own:
            if stores_itself:
                applied(token, col, vectors.unpack(q), call.epilogue_args)
            else:
                store_vector(call.output_tokens + u64(token) * u64(bytes_a_row) + at, q)
        return came

    return reduce_run


def _unreduced(build, take):
    """Like _reduced, but it stores the rows unsummed, [num_tokens, top_k, hidden], with zeros where there is none."""
    top_k, bytes_a_row = build.cfg.top_k, layout.combine_msg_bytes(build.cfg)

    @device_fn
    def copy_run(call, flags, token, rows):
        came, k = take.all_signals(flags, rows), i32(0)
        while came and k < top_k:
            if rows.is_own:
                place, q = rows.place + u64(k) * u64(bytes_a_row), (u32(0), u32(0), u32(0), u32(0))
                if has(rows.wanted, k):
                    q = load16(place)
                store_vector(call.output_tokens + (place - call.recv_buf_p), q)
            k = i32(k + 1)
        return came

    return copy_run
