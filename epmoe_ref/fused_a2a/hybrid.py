"""HybridEPDispatch and HybridEPCombine: permute, exchange and permute in one. A row for each (token, local expert)."""

import numpy as np

from ..casts import to_output_type
from ..errors import EPValueError
from ..formats import BlockwiseFP8TokenFormat
from . import arguments
from .hybrid_handle import HybridHandle, collect_probs, expand, expand_probs, hybrid_handle
from .sums import add, add_rows, zero_sums

FLOAT32 = (np.dtype(np.float32),)
BOOL = (np.dtype(bool),)


def hybrid_dispatch_forward(
    x,
    routing_map,
    probs,
    num_local_experts,
    *,
    num_permuted_tokens=None,
    pad_multiple=None,
    fp8_dispatch=False,
    p2p_world_size=None,
):
    """Send every token to each of its experts, rows grouped by expert.

    x: over ranks [T, H], bfloat16 or float16, rows a multiple of 16 bytes. T may differ between ranks.
    routing_map: over ranks bool [T, E], True where the token goes to the expert.
    probs: over ranks float32 [T, E], dense. Only the probs of routed pairs are read. Or None (also as a list).
    num_local_experts: L; E = R * L.
    num_permuted_tokens: P, one number for all ranks, so the host need not wait for counts. None: P is the exact number.
    pad_multiple: each expert's segment is rounded up to it; None or 0: no padding.
    fp8_dispatch: send blockwise FP8 (bfloat16 in, H a multiple of 128; each token is encoded once, by its src_rank,
    as BlockwiseFP8TokenFormat does). Upstream raises an error for it.
    p2p_world_size: ranks joined by a fast interconnect. It must divide R. It affects only where combine rounds.
    None: all ranks are one p2p world (1 gives the same numbers).

    Returns (dispatched_hidden, dispatched_probs, dispatched_scaling_factor, tokens_per_expert, handle). All but the
    handle are lists over ranks:
    dispatched_hidden [P, H], dtype of x (e4m3 with fp8_dispatch): grouped by expert, then ordered by src_rank, then
    token. Padding rows, and rows beyond the last segment, are zero (an implementation may leave the latter unwritten,
    with their probs and scales, here and in combine's gradient).
    dispatched_probs float32 [P]: the prob of the row's (token, expert); zero without a token. None on every rank if
    there are no probs.
    dispatched_scaling_factor float32 [P, H / 128]: the row's scales; zero without a token. None on every rank without
    fp8_dispatch.
    tokens_per_expert int64 [L]: rows of each expert, padding included. P is their sum, unless num_permuted_tokens is
    given. In that case, if the padded total exceeds P, the tail in expert-major order is dropped, and
    tokens_per_expert[e] = min(padded[e], max(0, P - sum of padded before e)).
    handle: HybridHandle; handle.overflow, over ranks int32 [1], is 1 if the padded total exceeded P (even if only by
    padding), else 0. Dropped rows do not count in combine or gradients.

    Errors: invalid shapes or dtypes, E != R * L, negative num_permuted_tokens or pad_multiple, H or dtype that FP8
    cannot encode, p2p_world_size that does not divide R.
    Source: HybridEPDispatch.forward of the fused_a2a page.
    """
    tokens = arguments.hidden_rows("x", x, dtypes=arguments.SIXTEEN_BIT)
    n_ranks, num_tokens = len(tokens), [len(array) for array in tokens]
    num_local_experts = arguments.whole("num_local_experts", num_local_experts, 1)
    num_experts = n_ranks * num_local_experts
    routed = arguments.matrices("routing_map", routing_map, n_ranks, dtypes=BOOL, n_rows=num_tokens)
    if routed[0].shape[1] != num_experts:
        raise EPValueError(
            f"routing_map[0] has {routed[0].shape[1]} columns: one for each expert, n_ranks * num_local_experts = "
            f"{n_ranks} * {num_local_experts} = {num_experts}, must be there; check num_local_experts"
        )
    probs = None if arguments.absent(probs) else probs
    if probs is not None:
        probs = arguments.matrices("probs", probs, n_ranks, dtypes=FLOAT32, n_rows=num_tokens, n_columns=num_experts)
    if num_permuted_tokens is not None:
        num_permuted_tokens = arguments.whole("num_permuted_tokens", num_permuted_tokens, 0)
    pad_multiple = 0 if pad_multiple is None else arguments.whole("pad_multiple", pad_multiple, 0)
    p2p_world_size = arguments.p2p_world(p2p_world_size, n_ranks)
    handle = hybrid_handle(routed, num_local_experts, num_permuted_tokens, pad_multiple, p2p_world_size)

    scaling_factor = [None] * n_ranks
    if fp8_dispatch:
        tokens, scales = blockwise_fp8(tokens)
        scaling_factor = expand(scales, handle)
    dispatched_probs = [None] * n_ranks if probs is None else expand_probs(probs, handle)
    tokens_per_expert = [counts.copy() for counts in handle.tokens_per_expert]
    return expand(tokens, handle), dispatched_probs, scaling_factor, tokens_per_expert, handle


def hybrid_dispatch_backward(handle, grad_hidden, grad_probs):
    """The gradients of dispatch: each token sums the gradients of its rows.

    grad_hidden: over ranks [P, H], bfloat16 or float16, rows a multiple of 16 bytes; also after fp8_dispatch.
    grad_probs: over ranks float32 [P], or None (also as a list).
    Rows without a token are not read. They may hold anything.

    Returns (grad_x, grad_probs), lists over ranks:
    grad_x [T, H], dtype of grad_hidden: summed and rounded as in `hybrid_combine_forward`.
    grad_probs float32 [T, E]: the row's gradient where a pair has a row (a copy, no sum), else +0.0, also for dropped
    pairs. None on every rank if grad_probs was not given.

    Errors: a handle of another routing, invalid shapes or dtypes.
    Source: HybridEPDispatch.backward of the fused_a2a page.
    """
    handle = arguments.handle_of(HybridHandle, handle)
    grad_x = sum_rows("grad_hidden", grad_hidden, handle)
    if arguments.absent(grad_probs):
        return grad_x, [None] * handle.n_ranks
    return grad_x, collect_probs(arguments.row_probs("grad_probs", grad_probs, handle.num_rows), handle)


def hybrid_combine_forward(x, handle, *, num_permuted_tokens=None, pad_multiple=None):
    """Send the rows back and sum them, unweighted: one result for each token.

    x: over ranks [P, H], bfloat16 or float16, rows a multiple of 16 bytes, in the order that dispatch made. Rows
    without a token are not read and may hold anything. H and dtype may differ from the dispatch's.
    num_permuted_tokens, pad_multiple: optional; if given, they must equal the handle's. num_permuted_tokens is then
    P, one number or a list over ranks, even if dispatch computed P itself.

    Returns combined_x, over ranks [T, H], dtype of x. With D that dtype, and all sums in float32 from +0.0:
    1. on each rank: D( sum over the token's local experts, ascending ),
    2. in each p2p world: D( sum of these over its ranks, ascending ),
    3. D( sum of these over the p2p worlds, ascending ), which changes nothing if there is only one.
    A token without rows gives +0.0.

    Errors: a handle of another routing, invalid shapes or dtypes, numbers that are not the handle's.
    Source: HybridEPCombine.forward of the fused_a2a page.
    """
    handle = arguments.handle_of(HybridHandle, handle)
    if num_permuted_tokens is not None:
        arguments.same_num_rows(num_permuted_tokens, handle.num_rows)
    if pad_multiple is not None and arguments.whole("pad_multiple", pad_multiple, 0) != handle.pad_multiple:
        raise EPValueError(
            f"pad_multiple={pad_multiple}, but the dispatch of this handle had {handle.pad_multiple}: they must be the "
            "same; leave it out"
        )
    return sum_rows("x", x, handle)


def hybrid_combine_backward(handle, grad_combined_x):
    """The gradient of combine: a cached dispatch, rows only.

    grad_combined_x: over ranks [T, H], bfloat16 or float16, rows a multiple of 16 bytes.
    Returns grad_x, over ranks [P, H], dtype of grad_combined_x: each row is a copy of its token's row. Rows without
    a token are zero.

    Errors: a handle of another routing, invalid shapes or dtypes.
    Source: HybridEPCombine.backward of the fused_a2a page.
    """
    handle = arguments.handle_of(HybridHandle, handle)
    tokens = arguments.hidden_rows(
        "grad_combined_x", grad_combined_x, handle.n_ranks, dtypes=arguments.SIXTEEN_BIT, n_rows=handle.num_tokens
    )
    return expand(tokens, handle)


def sum_rows(name: str, per_rank, handle: HybridHandle) -> list[np.ndarray]:
    """Rows [P, H] of every rank, checked, and summed over experts, ranks and worlds as in `hybrid_combine_forward`."""
    rows = arguments.hidden_rows(name, per_rank, handle.n_ranks, dtypes=arguments.SIXTEEN_BIT, n_rows=handle.num_rows)
    dtype, width = rows[0].dtype, rows[0].shape[1]
    n_local, world_size = handle.num_local_experts, handle.p2p_world_size
    sums = []
    for row_of in handle.row_of:
        total = zero_sums(len(row_of), width)
        for first_rank in range(0, handle.n_ranks, world_size):
            of_world = zero_sums(len(row_of), width)
            for rank in range(first_rank, first_rank + world_size):
                of_rank = zero_sums(len(row_of), width)
                for expert in range(rank * n_local, (rank + 1) * n_local):
                    add_rows(of_rank, row_of[:, expert], rows[rank])
                add(of_world, to_output_type(of_rank, dtype))
            add(total, to_output_type(of_world, dtype))
        sums.append(to_output_type(total, dtype))
    return sums


def blockwise_fp8(tokens: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """bfloat16 [T, H] of each rank to (e4m3 [T, H], float32 scales [T, H / 128]) of each rank."""
    dtype, hidden = tokens[0].dtype, tokens[0].shape[1]
    if dtype != arguments.BF16 or hidden % arguments.SCALE_GROUP:
        raise EPValueError(
            f"fp8_dispatch=True with x of dtype {dtype} and hidden={hidden}: FP8 is made from bfloat16 whose hidden "
            f"size is a multiple of {arguments.SCALE_GROUP}; convert and pad x, or set fp8_dispatch=False"
        )
    fp8 = BlockwiseFP8TokenFormat(hidden, top_k=1)
    encoded = [fp8.decode(fp8.encode(rows)) for rows in tokens]
    return [values for values, _ in encoded], [scales for _, scales in encoded]
