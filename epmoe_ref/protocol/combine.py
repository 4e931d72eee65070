"""The two halves of combine, as steps of one rank."""

from dataclasses import replace

import numpy as np

from ..config import READY
from ..dispatch import shared_expert_share
from ..errors import EPValueError
from ..reduce import COMBINE_DTYPES, applied, reduced, shared_rows, takes_part, weights_of
from .state import MAX_FINITE, RankState, Step, Write, sent


def combine_async(state: RankState, expert_outputs: np.ndarray, src_info: np.ndarray) -> Step:
    """Send every row of expert output back to its pair (token, k) on src_rank.

    expert_outputs: combine_dtype [rows, hidden], the rows of dispatch's output_tokens; src_info: int32 [rows, 2], from
    it.

    Before: as after dispatch_wait.
    During: for each segment (le, r), A[le, r] = (READY + end, count) names the rows [end - count, end). Row i with
    src_info[i] = (t, k) goes to combine_recv_buf[t, k] of rank r. A row outside [0, max_tokens_per_rank) x [0, top_k)
    is not sent. When all rows of the segment are written, count goes to combine_recv_count[le, my_rank] of rank r. This
    is the signal; it is sent even for a count of 0. `finished` may count the rows written, rank completion the signals.
    After: nothing else has changed in its own memory, except that combine_wait's zeroing may have begun. An entry of A
    may be zero once every reader has read it; `finished` may hold 0 or the rows of its segment; rank completion may be
    0 or the number of signals to each rank of the p2p world.

    skip_a2a: rows and signals go to its own memory; the rank axis has length 1. Errors: EPStateError if another step is
    due; EPValueError for wrong dtypes and shapes. Source: protocol section 6.
    """
    cfg, rank = state.cfg, state.rank
    ends, counts = state.region("A")[..., 0] - READY, state.region("A")[..., 1]
    n_rows = max(int(ends.max()), 0)
    dtype, shape = COMBINE_DTYPES[cfg.combine_dtype], expert_outputs.shape
    if expert_outputs.dtype != dtype or shape[1:] != (cfg.hidden,) or shape[0] < n_rows:
        form = f"{expert_outputs.dtype}{list(expert_outputs.shape)}"
        raise EPValueError(
            f"expert_outputs of rank {rank} is {form} and must be {dtype} [{n_rows} or more, hidden="
            f"{cfg.hidden}]: one row for each row of output_tokens"
        )
    state = state.begin("combine_async")
    rows_as_bytes = np.ascontiguousarray(expert_outputs).view(np.uint8)
    if cfg.fused_shared_expert:
        share = shared_expert_share(cfg, rank, len(state.topk_ids))[1]
        state = replace(state, shared_outputs=expert_outputs[:share].copy())
    writes = []
    for local_expert in range(cfg.n_local_experts):
        for dst in range(cfg.n_src_ranks):
            dst_rank, src = (rank, 0) if cfg.skip_a2a else (dst, rank)
            end, count = int(ends[local_expert, dst]), int(counts[local_expert, dst])
            token, k = np.asarray(src_info[end - count : end]).T
            valid = (token >= 0) & (token < cfg.max_tokens_per_rank) & (k >= 0) & (k < cfg.top_k)
            rows = rows_as_bytes[end - count : end][valid]
            writes.append(Write(dst_rank, "combine_recv_buf", (token[valid], k[valid]), rows))
            writes.append(Write(dst_rank, "combine_recv_count", (local_expert, src), count))
    return sent(state, writes)


def combine_wait(
    state: RankState,
    *,
    router_weights=None,
    router_weights_args=(),
    epilogue=None,
    epilogue_args=(),
    elementwise_lambda_fn=None,
) -> Step:
    """Wait until the rows of all ranks have come back and reduce them by token; the result is the combined output.

    router_weights (float32 [num_tokens, top_k] or a function), epilogue, elementwise_lambda_fn and their args: as in
    epmoe_ref.combine, of this rank. Result: combine_dtype [num_tokens, hidden]; without router weights [num_tokens,
    top_k, hidden]; None with an output lambda.

    Before: as after combine_async; every word of combine_recv_count differs from MAX_FINITE (the step waits for that),
    and combine_recv_buf[t, k] holds the row of each pair of this rank's tokens.
    During: combine_wait[block] is the ready flag of each reducing block.
    After: A, reserved, finished, rank completion and combine_wait are 0, D to G still are; every word of
    combine_recv_count is MAX_FINITE; B and C are free; combine_recv_buf still holds the rows, until the next round.

    The sum is epmoe_ref.combine's: ks with -1 are skipped, and under skip_a2a ks of experts elsewhere,
    whatever combine_recv_buf holds there. A pair whose row was not sent counts with the bytes in its place. Source:
    protocol section 6.
    """
    state = state.begin("combine_wait")
    cfg, num_tokens = state.cfg, len(state.topk_ids)
    dtype = COMBINE_DTYPES[cfg.combine_dtype]
    recv = state.combine_recv_buf[:num_tokens].view(dtype)
    part = takes_part(cfg, state.topk_ids, state.rank)
    if router_weights is None:
        result = np.where(part[..., None], recv.view(np.uint8), np.uint8(0)).view(dtype)
    else:
        tokens = slice(0, num_tokens)
        weights = weights_of(cfg, router_weights, router_weights_args, num_tokens)
        shared = shared_rows(cfg, state.rank, num_tokens, state.shared_outputs, tokens)
        result = reduced(recv, weights, part, shared)
        functions = dict(epilogue=epilogue, elementwise_lambda_fn=elementwise_lambda_fn)
        for name, function in functions.items():
            if function is not None:
                result = applied(name, function, tokens, result, epilogue_args)
    state.combine_recv_count[:] = MAX_FINITE
    for name in ("A", "reserved", "finished", "rank_completion", "combine_wait"):
        state.region(name)[:] = 0
    return Step(state, [], result)
