"""Combine: sends the experts' results back to their tokens' ranks, which sum them."""

import numpy as np

from .config import EPConfig
from .dispatched import segments
from .errors import EPValueError
from .functions import check_function
from .over_ranks import over_ranks
from .reduce import COMBINE_DTYPES, applied, reduced, shared_rows, takes_part, weights_of

_BLOCK_BYTES = 1 << 19  # of recv_buf: small groups of tokens keep the scratch in the cache


def combine(
    cfg: EPConfig,
    expert_outputs,
    dispatched,
    *,
    router_weights=None,
    router_weights_args=(),
    epilogue=None,
    epilogue_args=(),
    elementwise_lambda_fn=None,
) -> list[np.ndarray | None]:
    """Send every row of expert output back to its pair (token, k), and reduce over k; returns a list over ranks.

    expert_outputs: list over ranks of combine_dtype [rows, hidden], in the order of output_tokens, with shared-expert
        rows and padding rows; row_offsets[-1] rows or more. Rows past the end and padding rows are never read.
    dispatched: list over ranks, the result of dispatch (output_tokens and scales are not used and may be missing).
    router_weights: None, or list over ranks of float32 [num_tokens, top_k], or one function for all ranks,
        (token, k, *router_weights_args) -> float32, which gets int32 [num_tokens, 1] and [1, top_k].
    epilogue: None, or a function (token, col, value, *epilogue_args) -> value, for all ranks, called with int32
        [n, 1], int32 [1, hidden] and float32 [n, hidden]; it needs router weights.
    elementwise_lambda_fn: None, or the specification's output lambda: a function (token, col, value, *epilogue_args),
        instead of the epilogue and called with the same arrays. It stores its results into writable arrays in
        epilogue_args and returns nothing. Nothing else is stored, and the result of each rank is None.
    router_weights_args, epilogue_args: tuples. A list in them has one entry for each rank. Anything else is for all.

    With router weights w the result is combine_dtype [num_tokens, hidden]:
        acc = +0.0; for k = 0 .. top_k - 1: acc = fma(w[t, k], float32(recv[t, k, :]), acc); result = cast(acc)
    with one rounding a step and a cast to nearest even. A fused shared expert's row for the token is added to the cast
    sum in the output type, with a second rounding; under skip_a2a tokens outside the rank's share add +0.0. The
    epilogue gets the float32 value of the result. Its return value, as float32, is rounded once to the output type.
    The output lambda gets the same value; each (token, col) is in exactly one of its calls, whose number and order are
    unspecified. Without router weights the result is recv itself, [num_tokens, top_k, hidden], bit for bit.

    Pairs with id -1, and under skip_a2a pairs of other ranks' experts, are skipped: they add nothing, even if their
    weight is NaN, and their rows of the unreduced result are zero. A row whose src_info is outside
    [0, num_tokens) x [0, top_k) is not sent; its pair counts as a row of zeros (on the device, of any bytes). Under
    skip_a2a each rank's result covers only its own experts; an all-reduce sums the results. The bits of a NaN that
    arithmetic produces are unspecified.

    Errors: EPValueError for a wrong number of ranks, dtype or shape, a scalar as router weights; an epilogue, output
    lambda or fused shared expert without router weights; epilogue and output lambda together; a value function
    (router_weights, epilogue) that returns None, text, a list, complex numbers or another shape; an output lambda that
    returns a value. Source: the combine_wait_kernel page (docs/pages.md).
    """
    function_name, function = "epilogue", epilogue
    if elementwise_lambda_fn is not None:
        if epilogue is not None:
            raise EPValueError(
                "epilogue and elementwise_lambda_fn together: one returns the value to store, the other "
                "stores it itself; give one of them"
            )
        function_name, function = "elementwise_lambda_fn", elementwise_lambda_fn
    _check(cfg, expert_outputs, dispatched, router_weights, function_name, function)
    check_function(
        "router_weights", router_weights if callable(router_weights) else None, ("token", "k"), router_weights_args
    )
    check_function(function_name, function, ("token", "col", "value"), epilogue_args, "epilogue_args")
    senders = [_senders(cfg, dispatched, rank) for rank in range(cfg.n_ranks)]
    if router_weights is None:
        return [_unreduced(cfg, expert_outputs, dispatched[rank], rank, senders[rank]) for rank in range(cfg.n_ranks)]
    results = []
    for rank in range(cfg.n_ranks):
        num_tokens = dispatched[rank].num_tokens
        weights = router_weights if callable(router_weights) else router_weights[rank]
        weights = weights_of(cfg, weights, _of_rank(cfg, "router_weights_args", router_weights_args, rank), num_tokens)
        args = _of_rank(cfg, "epilogue_args", epilogue_args, rank)
        out = (
            np.empty((num_tokens, cfg.hidden), COMBINE_DTYPES[cfg.combine_dtype])
            if elementwise_lambda_fn is None
            else None
        )
        part = takes_part(cfg, dispatched[rank].topk_ids, rank)
        for block in _blocks(cfg, num_tokens):
            recv = _recv(cfg, expert_outputs, senders[rank][block], part[block])
            shared = shared_rows(cfg, rank, num_tokens, expert_outputs[rank], block)
            value = reduced(recv, weights[block], part[block], shared)
            stored = value if function is None else applied(function_name, function, block, value, args)
            if out is not None:
                out[block] = stored
        results.append(out)
    return results


def _senders(cfg: EPConfig, dispatched, rank: int) -> np.ndarray:
    """The row that each pair of a rank receives: int64 [num_tokens, top_k, 2] = (owner, its row), (-1, -1) if none.

    This is combine_async as the receiver sees it: rows of the segment (local expert, rank) go to recv[src_info].
    """
    num_tokens = dispatched[rank].num_tokens
    senders = np.full((num_tokens, cfg.top_k, 2), -1, np.int64)
    for owner in [rank] if cfg.skip_a2a else range(cfg.n_ranks):
        src_index = 0 if cfg.skip_a2a else rank
        for segment in segments(dispatched[owner]):
            if segment.src_rank == src_index:
                token, k = np.asarray(dispatched[owner].src_info[segment.start : segment.end]).T
                sent = (token >= 0) & (token < num_tokens) & (k >= 0) & (k < cfg.top_k)
                senders[token[sent], k[sent], 0] = owner
                senders[token[sent], k[sent], 1] = np.arange(segment.start, segment.end)[sent]
    return senders


def _recv(cfg: EPConfig, expert_outputs, senders: np.ndarray, part: np.ndarray) -> np.ndarray:
    """recv_buf of a group of tokens: combine_dtype [n, top_k, hidden]. Pairs that were skipped or not sent are zero."""
    recv = np.zeros((*part.shape, cfg.hidden), COMBINE_DTYPES[cfg.combine_dtype])
    owners = np.where(part, senders[..., 0], -1)
    for owner in np.unique(owners[owners >= 0]).tolist():
        pairs = owners == owner
        recv[pairs] = expert_outputs[owner][senders[pairs, 1]]
    return recv


def _blocks(cfg: EPConfig, num_tokens: int):
    step = max(1, _BLOCK_BYTES // (cfg.top_k * cfg.hidden * cfg.combine_itemsize))
    return (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))


def _unreduced(cfg, expert_outputs, d, rank, senders) -> np.ndarray:
    out = np.empty((d.num_tokens, cfg.top_k, cfg.hidden), COMBINE_DTYPES[cfg.combine_dtype])
    part = takes_part(cfg, d.topk_ids, rank)
    for block in _blocks(cfg, d.num_tokens):
        out[block] = _recv(cfg, expert_outputs, senders[block], part[block])
    return out


def _of_rank(cfg: EPConfig, name: str, args, rank: int) -> list:
    for i, arg in enumerate(args):
        if isinstance(arg, list) and len(arg) != cfg.n_ranks:
            raise EPValueError(
                f"{name}[{i}] is a list of {len(arg)} entries and must have one entry a rank, "
                f"n_ranks={cfg.n_ranks}: give a tuple or an array for what all ranks share"
            )
    return [arg[rank] if isinstance(arg, list) else arg for arg in args]


def _check(cfg: EPConfig, expert_outputs, dispatched, router_weights, function_name: str, function) -> None:
    if router_weights is None and function is not None:
        raise EPValueError(
            f"{function_name} without router_weights: it is applied to the reduced output; give router weights"
        )
    if router_weights is None and cfg.fused_shared_expert:
        raise EPValueError(
            "fused_shared_expert=True without router_weights: the shared expert's output is added to "
            "the reduced output; give router weights, or dispatch without the shared expert"
        )
    for name, values in (("expert_outputs", expert_outputs), ("dispatched", dispatched)):
        over_ranks(cfg, name, values)
    dtype = COMBINE_DTYPES[cfg.combine_dtype]
    for rank, (rows, d) in enumerate(zip(expert_outputs, dispatched)):
        n_rows = int(d.row_offsets[-1])
        if not isinstance(rows, np.ndarray) or rows.dtype != dtype:
            raise EPValueError(
                f"expert_outputs of rank {rank} is {_describe(rows)} and must be a NumPy array of "
                f"{dtype}, the combine_dtype: convert it, or choose another combine_dtype"
            )
        if rows.ndim != 2 or rows.shape[1] != cfg.hidden or len(rows) < n_rows:
            raise EPValueError(
                f"expert_outputs of rank {rank} is {_describe(rows)} and must be [{n_rows}, hidden="
                f"{cfg.hidden}]: one row for each row of output_tokens, padding included"
            )
    if router_weights is not None and not callable(router_weights):
        _check_weights(cfg, router_weights, dispatched)


def _check_weights(cfg: EPConfig, router_weights, dispatched) -> None:
    if not isinstance(router_weights, (list, tuple)) and np.ndim(router_weights) == 0:
        raise EPValueError(
            f"router_weights={router_weights!r} is a scalar and must be float32 arrays [num_tokens, "
            "top_k] or a function: use numpy.full"
        )
    over_ranks(cfg, "router_weights", router_weights)
    for rank, (weights, d) in enumerate(zip(router_weights, dispatched)):
        shape = (d.num_tokens, cfg.top_k)
        if not isinstance(weights, np.ndarray) or weights.dtype != np.float32 or weights.shape != shape:
            raise EPValueError(
                f"router_weights of rank {rank} is {_describe(weights)} and must be float32 "
                f"{list(shape)} (num_tokens, top_k): convert or reshape it"
            )


def _describe(value) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else f"of type {type(value).__name__}"
