"""Routing of one rank: the expert ids of its tokens, checked and sorted."""

from typing import NamedTuple

import numpy as np

from .config import EPConfig
from .errors import EPValueError


class Routes(NamedTuple):
    """The pairs of one rank's tokens, sorted by global expert, then by (token, k).

    token, k: int32 [pairs]. offsets: int64 [n_experts + 1]; the pairs of expert e are [offsets[e], offsets[e + 1]).
    """

    token: np.ndarray
    k: np.ndarray
    offsets: np.ndarray


def clean_topk_ids(cfg: EPConfig, topk_ids, rank: int) -> np.ndarray:
    """The ids of one rank's tokens as int32, checked: any integer dtype [num_tokens, top_k] to int32 of that shape.

    -1 means "no expert". Errors: EPValueError for a wrong dtype or shape, more tokens than max_tokens_per_rank, an id
    outside [0, n_experts) that is not -1, and an id that occurs twice in one token (the receiver finds k by the id).
    The message names rank, token, k and value. Ids are checked before the cast to int32, so none can wrap around
    into the range.
    """
    ids = np.asarray(topk_ids)
    if ids.ndim != 2 or ids.shape[1] != cfg.top_k:
        raise EPValueError(
            f"topk_ids of rank {rank} has shape {list(ids.shape)} and must be [num_tokens, "
            f"top_k={cfg.top_k}]: fill the rest with -1"
        )
    if ids.dtype.kind not in "iu":
        raise EPValueError(f"topk_ids of rank {rank} has dtype {ids.dtype} and must be of an integer type: convert it")
    if len(ids) > cfg.max_tokens_per_rank:
        raise EPValueError(
            f"rank {rank} has {len(ids)} tokens and max_tokens_per_rank is {cfg.max_tokens_per_rank}: "
            "raise max_tokens_per_rank or split the tokens"
        )
    bad = ids >= cfg.n_experts
    if ids.dtype.kind == "i":
        bad |= ids < -1
    if bad.any():
        token, k = np.argwhere(bad)[0].tolist()
        raise EPValueError(
            f"topk_ids of rank {rank}, token {token}, k {k} is {ids[token, k]} and must be in "
            f"[0, n_experts={cfg.n_experts}), or -1 for no expert ({np.count_nonzero(bad)} such ids)"
        )
    ids = ids.astype(np.int32)
    _check_distinct(ids, rank)
    return ids


def routes(cfg: EPConfig, topk_ids: np.ndarray) -> Routes:
    """The pairs of one rank, sorted by global expert: int32 [num_tokens, top_k] to Routes. Ids of -1 are left out."""
    flat = topk_ids.reshape(-1)
    pairs = np.flatnonzero(flat >= 0)
    experts = flat[pairs]
    pairs = pairs[np.argsort(experts, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(experts, minlength=cfg.n_experts))])
    token, k = np.divmod(pairs.astype(np.int32), np.int32(cfg.top_k))
    return Routes(token, k, offsets)


def _check_distinct(ids: np.ndarray, rank: int) -> None:
    in_order = np.sort(ids, axis=1)
    twice = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any(axis=1)
    if not twice.any():
        return
    token = int(np.flatnonzero(twice)[0])
    row = ids[token].tolist()
    k = next(i for i, value in enumerate(row) if value >= 0 and value in row[:i])
    raise EPValueError(
        f"topk_ids of rank {rank}, token {token}, k {k} is {row[k]}, as k "
        f"{row.index(row[k])} is already: the ids of one token must be distinct; use -1 for no "
        f"expert ({np.count_nonzero(twice)} such tokens)"
    )
