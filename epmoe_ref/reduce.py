"""The sum over k of a token's returned rows, for one rank."""

import numpy as np
from ml_dtypes import bfloat16

from .arithmetic import fma_rn
from .casts import to_float32, to_output_type
from .config import EPConfig
from .dispatch import shared_expert_share
from .errors import EPValueError
from .functions import returned_values

COMBINE_DTYPES = {"bf16": np.dtype(bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def takes_part(cfg: EPConfig, topk_ids: np.ndarray, rank: int) -> np.ndarray:
    """Which pairs of a rank's tokens count in the sum: bool [num_tokens, top_k].

    These are the pairs with an expert; under skip_a2a, the pairs whose expert the rank owns.
    """
    if cfg.skip_a2a:
        return (topk_ids >= 0) & (cfg.owner(topk_ids) == rank)
    return topk_ids >= 0


def weights_of(cfg: EPConfig, router_weights, args, num_tokens: int) -> np.ndarray:
    """The router weights of one rank, float32 [num_tokens, top_k], from an array or a function (token, k, *args).

    A function gets int32 [num_tokens, 1] and [1, top_k]. Errors: EPValueError (returned_values).
    """
    if not callable(router_weights):
        return router_weights
    token = np.arange(num_tokens, dtype=np.int32)[:, None]
    k = np.arange(cfg.top_k, dtype=np.int32)[None, :]
    with np.errstate(all="ignore"):
        weights = router_weights(token, k, *args)
    return returned_values("router_weights", weights, (num_tokens, cfg.top_k))


def shared_rows(cfg: EPConfig, rank: int, num_tokens: int, shared_outputs: np.ndarray, block: slice):
    """The shared expert's rows for a block of a rank's tokens, [n, hidden]; None without a fused shared expert.

    shared_outputs: the shared expert's rows for the rank's share of tokens, or more rows. Other tokens get +0.0.
    """
    if not cfg.fused_shared_expert:
        return None
    first, n_rows = shared_expert_share(cfg, rank, num_tokens)
    shared = np.zeros((block.stop - block.start, cfg.hidden), COMBINE_DTYPES[cfg.combine_dtype])
    start, stop = max(block.start, first), min(block.stop, first + n_rows)
    if start < stop:
        shared[start - block.start : stop - block.start] = shared_outputs[start - first : stop - first]
    return shared


def reduced(recv: np.ndarray, weights: np.ndarray, part: np.ndarray, shared: np.ndarray | None) -> np.ndarray:
    """Weighted sums of returned rows: output type [n, top_k, hidden] and float32 [n, top_k] to [n, hidden].

    acc = +0.0; for k = 0 .. top_k - 1 where part[t, k]: acc = fma(weights[t, k], float32(recv[t, k]), acc). Then one
    cast to the output type. The shared expert's rows are added in that type, with a second rounding.
    """
    value = to_output_type(_weighted_sum(recv, weights, part), recv.dtype)
    if shared is None:
        return value
    with np.errstate(all="ignore"):
        # float32 has enough digits, so rounding its sum once more gives the sum in the output type.
        return to_output_type(to_float32(value) + to_float32(shared), value.dtype)


def applied(name: str, function, block: slice, value: np.ndarray, args) -> np.ndarray | None:
    """The epilogue's values for a block of tokens, rounded once. None for an output lambda: it stores its results."""
    token = np.arange(block.start, block.stop, dtype=np.int32)[:, None]
    col = np.arange(value.shape[1], dtype=np.int32)[None, :]
    with np.errstate(all="ignore"):
        returned = function(token, col, to_float32(value), *args)
    if name == "epilogue":
        return to_output_type(returned_values(name, returned, value.shape), value.dtype)
    if returned is not None:
        raise EPValueError(
            f"elementwise_lambda_fn returned {type(returned).__name__} and must return nothing: it "
            "stores its result itself; a function that returns the value is given as epilogue"
        )
    return None


def _weighted_sum(recv: np.ndarray, weights: np.ndarray, part: np.ndarray) -> np.ndarray:
    n_tokens, top_k, hidden = recv.shape
    acc = np.zeros((n_tokens, hidden), np.float32)
    for k in range(top_k):
        tokens = np.flatnonzero(part[:, k])
        if len(tokens) == n_tokens:
            acc = fma_rn(weights[:, k, None], to_float32(recv[:, k]), acc)
        elif len(tokens):
            acc[tokens] = fma_rn(weights[tokens, k, None], to_float32(recv[tokens, k]), acc[tokens])
    return acc
