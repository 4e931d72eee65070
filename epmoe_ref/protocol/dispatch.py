"""The two halves of dispatch, as steps of one rank."""

from dataclasses import replace

import numpy as np

from .. import dispatch as reference
from ..config import READY
from ..dispatch import check_tokens, shared_expert_share
from ..errors import EPValueError
from ..formats import format_of
from ..routing import clean_topk_ids
from .state import MAX_FINITE, RankState, Step, Write, sent


def dispatch_async(state: RankState, input_tokens, topk_ids, *, input_scale=1, claims=None) -> Step:
    """Send each pair (token, k) of this rank to the owner of its expert.

    input_tokens [num_tokens, hidden], topk_ids integers [num_tokens, top_k], input_scale: as in
    epmoe_ref.dispatch, of this rank. claims: the order in which pairs claim their slots: None for (token, k) order, a
    seed for a random order, or the pairs themselves, int [pairs, 2] = (token, k) in the order in which they claim.

    Before: the rank's recv_counts hold MAX_FINITE, or signals from peers that are ahead; reserved, finished, rank
    completion, D to G, A and combine_wait are 0; B and C hold anything.
    During: a pair with expert e = topk_ids[t, k] claims slot s = reserved[le, d]++, d = owner(e), le = local(e), and
    writes the message to recv_buf[le, my_rank, s] of rank d; then finished[le, d]++. Once that is the number of pairs
    with e, it writes this count, even 0, to recv_count[le, my_rank] of rank d: the signal, n_experts of them in all. A
    signal to a rank of its own p2p world adds 1 to rank_completion[its place in that world].
    After: reserved[le, d] = finished[le, d] = the pairs of expert le of rank d; rank_completion = n_local_experts for
    each rank of its own p2p world, else 0; send_buf[t] = the message of token t (free if the token has no pair to
    send). No other counter has changed, except that F and G are free with a fused shared expert, because a split kernel
    may already count in them (dispatch_wait resets them).

    Message: payload | src_info int32 t | topk_info uint16 [top_k], each padded to `alignment`; padding bytes are 0 here
    and free. Order: which pair gets which slot of a segment (local expert, src_rank) is free; it is a permutation.
    skip_a2a: only pairs whose expert this rank owns are sent, with signals for its own experts only; the axis of rank d
    has length 1 everywhere.
    Errors: EPStateError if another step is due; EPValueError as epmoe_ref.dispatch, and for claims that are not
    the pairs. Source: protocol sections 2, 4 and 5.
    """
    cfg, rank, fmt = state.cfg, state.rank, format_of(state.cfg)
    topk_ids = clean_topk_ids(cfg, topk_ids, rank)
    check_tokens(cfg, input_tokens, len(topk_ids), rank)
    state = replace(state.begin("dispatch_async"), topk_ids=topk_ids)
    state.rows_here[:] = False
    scale = reference.input_scales(cfg, input_scale)[rank]
    messages = fmt.messages(reference.rounded_tokens(input_tokens), topk_ids, scale)
    state.dispatch_send_buf[: len(messages)] = messages

    kept = (topk_ids >= 0) & (cfg.owner(topk_ids) == rank) if cfg.skip_a2a else topk_ids >= 0
    token, k = _in_claimed_order(np.argwhere(kept), claims).T
    expert = topk_ids[token, k]
    reserved, finished = state.region("reserved"), state.region("finished")
    writes = []
    for dst_rank in [rank] if cfg.skip_a2a else range(cfg.n_ranks):
        dst, src = (0, 0) if cfg.skip_a2a else (dst_rank, rank)
        for local_expert in range(cfg.n_local_experts):
            tokens = token[expert == dst_rank * cfg.n_local_experts + local_expert]
            n, at = len(tokens), (local_expert, src)
            reserved[local_expert, dst] = finished[local_expert, dst] = n
            writes.append(Write(dst_rank, "dispatch_recv_buf", (*at, slice(n)), messages[tokens]))
            writes.append(Write(dst_rank, "dispatch_recv_count", at, n))
        if cfg.world(dst_rank) == cfg.world(rank):
            state.region("rank_completion")[cfg.world_rank(dst_rank)] = cfg.n_local_experts
    return sent(state, writes)


def dispatch_wait(state: RankState) -> Step:
    """Wait for the counts of all segments and copy the messages into rows for the experts. The result is a Dispatched.

    Before: as after dispatch_async; every word of dispatch_recv_count differs from MAX_FINITE (the step waits for
    that), and slots [0, c[le, r]) of recv_buf[le, r] hold messages, c being the counts.
    During: B[le, r] = c[le, 0] + ... + c[le, r]. C[le] counts claimed tiles of 128 rows. D counts blocks that are done.
    E is READY once B and row_offsets are written. F counts the shared expert's rows in send_buf, G those claimed.
    After: A[le, r] = (READY + end row of the segment in the output, c[le, r]), where end rows include the shared
    expert's rows and the format's row padding; reserved, finished, rank completion, D, E, F, G are 0; every word of
    dispatch_recv_count is MAX_FINITE; B and C are free (the next dispatch_wait writes them before it reads them);
    recv_buf still holds the messages, until peers send the next round.

    Rows: by group, then src_rank, then slot. The k of a row is where topk_info holds the row's own global expert id.
    With a fused shared expert, group 0 holds the payloads in send_buf of the rank's share of tokens. Source: protocol
    sections 4, 5.
    """
    state = state.begin("dispatch_wait")
    cfg, fmt = state.cfg, format_of(state.cfg)
    counts = state.dispatch_recv_count.astype(np.int32)
    result = reference.empty_result(cfg, state.rank, counts, state.topk_ids)
    if cfg.fused_shared_expert:
        first, n_rows = shared_expert_share(cfg, state.rank, result.num_tokens)
        _put_rows(fmt, result, 0, 0, state.dispatch_send_buf[first : first + n_rows])
    for local_expert in range(cfg.n_local_experts):
        group, row = local_expert + cfg.fused_shared_expert, 0
        for src, count in enumerate(counts[local_expert].tolist()):
            messages = state.dispatch_recv_buf[local_expert, src, :count]
            rows = _put_rows(fmt, result, group, row, messages)
            token, ids = _trailer(fmt, messages)
            result.src_info[rows, 0] = token
            expert = state.rank * cfg.n_local_experts + local_expert
            result.src_info[rows, 1] = np.argmax(ids == expert, axis=1)
            row += count
            state.region("A")[local_expert, src] = READY + rows.stop, count
    state.region("B")[:] = np.cumsum(counts, axis=1)
    state.region("C")[:] = -(-counts.sum(axis=1) // 128)
    state.dispatch_recv_count[:] = MAX_FINITE
    for name in ("reserved", "finished", "rank_completion", "D", "E", "F", "G"):
        state.region(name)[:] = 0
    return Step(state, [], result)


def _in_claimed_order(pairs: np.ndarray, claims) -> np.ndarray:
    if claims is None:
        return pairs
    if np.ndim(claims) == 0:
        return np.random.default_rng(claims).permutation(pairs)
    claims = np.asarray(claims, np.int64).reshape(-1, 2)
    if sorted(claims.tolist()) != pairs.tolist():
        raise EPValueError(
            f"claims has {len(claims)} pairs and must hold each of the {len(pairs)} pairs (token, k) "
            "that are sent exactly once: give a seed for a random order"
        )
    return claims


def _put_rows(fmt, result, group: int, first: int, messages: np.ndarray) -> slice:
    start = int(result.row_offsets[group]) + first
    rows = slice(start, start + len(messages))
    values, scales = fmt.decode(messages)
    result.output_tokens[rows] = values
    if scales is not None:
        reference.put_scales(fmt, result, group, first, scales)
    return rows


def _trailer(fmt, messages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    src_info, topk_info = fmt.src_info_offset(), fmt.topk_info_offset()
    token = np.ascontiguousarray(messages[:, src_info : src_info + 4]).view("<i4")[:, 0]
    ids = np.ascontiguousarray(messages[:, topk_info : topk_info + 2 * fmt.top_k])
    return token, ids.view("<u2")
