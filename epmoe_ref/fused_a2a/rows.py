"""FusedDispatch and FusedCombine: a token is sent to a rank once, even if several of its experts are there."""

import numpy as np

from ..casts import to_output_type
from . import arguments
from .rows_handle import RowsHandle, gather, rows_handle
from .sums import add_rows, zero_sums

FLOAT32 = (np.dtype(np.float32),)


def dispatch_forward(x, token_indices, token_probs, num_experts):
    """Send every token once to each rank that has one of its experts.

    x: over ranks [T, H], any dtype without references, rows a multiple of 16 bytes; or, as an extension to upstream,
    blockwise FP8 as pairs (e4m3 [T, H], float32 scales [T, H / 128]).
    token_indices: over ranks [T, K], any integer dtype, distinct global expert ids, -1 for no expert (dropped).
    token_probs: over ranks float32 [T, K].
    num_experts: E, a multiple of the number of ranks; K <= E.

    Returns (recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle). All but the handle are lists over
    ranks:
    recv_x [N, H], dtype of x (pairs if x was): one row for each (token, this rank), ordered by src_rank, then token.
    Not grouped by expert. A token whose ids are all -1 is not sent.
    recv_token_indices int64 [N, K]: the row's local ids, id - rank * L, at the same k. -1 if another rank owns the
    expert, or there is none.
    recv_token_probs float32 [N, K]: the row's probs; always +0.0 where recv_token_indices is -1.
    tokens_per_expert int64 [L]: number of pairs (row, k) of each local expert. No padding.
    handle: RowsHandle.

    Errors: invalid shapes or dtypes, ids outside [-1, E), an id twice in a token, E not a multiple of R.
    Source: FusedDispatch.forward of the fused_a2a page.
    """
    is_pair = isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], tuple)
    parts = arguments.scaled_rows("x", x) if is_pair else (arguments.hidden_rows("x", x),)
    n_ranks, num_tokens = len(parts[0]), [len(array) for array in parts[0]]
    num_local_experts = arguments.experts_per_rank(num_experts, n_ranks)
    num_experts = n_ranks * num_local_experts
    ids = arguments.expert_indices("token_indices", token_indices, num_tokens, num_experts)
    probs = arguments.matrices(
        "token_probs", token_probs, n_ranks, dtypes=FLOAT32, n_rows=num_tokens, n_columns=ids[0].shape[1]
    )
    handle = rows_handle(ids, num_experts)

    received = [gather(part, handle) for part in parts]
    recv_x = list(zip(*received)) if is_pair else received[0]
    recv_token_indices, recv_token_probs, tokens_per_expert = [], [], []
    for rank, (row_ids, row_probs) in enumerate(zip(gather(ids, handle), gather(probs, handle))):
        here = row_ids // num_local_experts == rank  # -1 // L is -1: no rank
        recv_token_indices.append(np.where(here, row_ids - rank * num_local_experts, -1))
        recv_token_probs.append(np.where(here, row_probs, np.float32(0)))
        tokens_per_expert.append(np.bincount(recv_token_indices[rank][here], minlength=num_local_experts))
    return recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle


def dispatch_backward(handle, grad_recv_x, grad_recv_token_probs):
    """The gradients of dispatch: each token sums the gradients of its rows.

    grad_recv_x: over ranks [N, H], bfloat16, float16 or float32, rows a multiple of 16 bytes.
    grad_recv_token_probs: over ranks float32 [N, K], or None (also as a list).

    Returns (grad_x, grad_token_probs), lists over ranks:
    grad_x [T, H], dtype of grad_recv_x: summed and rounded as in `combine_forward`.
    grad_token_probs float32 [T, K]: for each k, the row's gradient, summed in float32 over the ranks that got t,
    ascending. Nothing is masked: it is the exact adjoint only if the caller's gradient is 0 where recv_token_indices is
    -1. None on every rank if grad_recv_token_probs was not given.

    Errors: a handle of another routing, invalid shapes or dtypes.
    Source: FusedDispatch.backward of the fused_a2a page.
    """
    handle = arguments.handle_of(RowsHandle, handle)
    grad_x = combine_rows("grad_recv_x", grad_recv_x, handle)
    if arguments.absent(grad_recv_token_probs):
        return grad_x, [None] * handle.n_ranks
    grad_probs = arguments.matrices(
        "grad_recv_token_probs",
        grad_recv_token_probs,
        handle.n_ranks,
        dtypes=FLOAT32,
        n_rows=handle.num_rows,
        n_columns=handle.top_k,
    )
    return grad_x, sum_over_ranks(grad_probs, handle)


def combine_forward(x, handle):
    """Send the rows back and sum them: one result for each token.

    x: over ranks [N, H], bfloat16, float16 or float32, rows a multiple of 16 bytes, in the order that dispatch made.
    The caller has weighted the rows and summed them over the local experts. H and dtype may differ from the dispatch's.

    Returns combined_x, over ranks [T, H], dtype of x:
    combined_x[t] = cast( sum over the ranks that got t, ascending, in float32, of float32(x_rank[row of t]) ), with one
    rounding, at the end. A token that was not sent gives +0.0.

    Errors: a handle of another routing, invalid shapes or dtypes.
    Source: FusedCombine.forward of the fused_a2a page.
    """
    return combine_rows("x", x, arguments.handle_of(RowsHandle, handle))


def combine_backward(handle, grad_combined_x):
    """The gradient of combine: a cached dispatch, rows only.

    grad_combined_x: over ranks [T, H], any dtype without references, rows a multiple of 16 bytes.
    Returns grad_x, over ranks [N, H], dtype of grad_combined_x: each row is a copy of its token's row.

    Errors: a handle of another routing, invalid shapes.
    Source: FusedCombine.backward of the fused_a2a page.
    """
    handle = arguments.handle_of(RowsHandle, handle)
    rows = arguments.hidden_rows("grad_combined_x", grad_combined_x, handle.n_ranks, n_rows=handle.num_tokens)
    return gather(rows, handle)


def combine_rows(name: str, per_rank, handle: RowsHandle) -> list[np.ndarray]:
    """Rows [N, H] of every rank, checked and summed over ranks."""
    rows = arguments.hidden_rows(name, per_rank, handle.n_ranks, dtypes=arguments.SUMMED, n_rows=handle.num_rows)
    return sum_over_ranks(rows, handle)


def sum_over_ranks(rows: list[np.ndarray], handle: RowsHandle) -> list[np.ndarray]:
    """Each token's sum over the ranks that have a row of it: ascending, in float32, rounded once to their dtype."""
    sums = []
    for row_of in handle.row_of:
        total = zero_sums(len(row_of), rows[0].shape[1])
        for rank in range(handle.n_ranks):
            add_rows(total, row_of[:, rank], rows[rank])
        sums.append(to_output_type(total, rows[0].dtype))
    return sums
