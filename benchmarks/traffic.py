"""Routing drawn from a seed, the same on every rank, and the bytes that it must move between ranks."""

from functools import lru_cache

import numpy as np

SCALE_GROUP, SCALE_BYTES = 128, 4  # of blockwise fp8


@lru_cache(4)
def topk_ids(shape, n_ranks, seed=0):
    """List over ranks of int32 (tokens, top_k): distinct experts in a token, no id is -1.

    uniform: all experts alike. zipf: popularity 1 / i over a fixed random permutation of the experts, drawn without
    replacement (the largest of log(popularity) + Gumbel noise).
    """
    rng = np.random.default_rng(seed)
    popularity = np.zeros(shape.experts)
    if shape.routing == "zipf":
        popularity = -np.log(1.0 + rng.permutation(shape.experts))
    ids = []
    for _ in range(n_ranks):
        drawn = popularity + rng.gumbel(size=(shape.tokens, shape.experts))
        best = np.argpartition(-drawn, shape.top_k - 1, axis=1)[:, : shape.top_k]
        order = np.argsort(-np.take_along_axis(drawn, best, axis=1), axis=1)
        ids.append(np.take_along_axis(best, order, axis=1).astype(np.int32))
    return ids


def payload_bytes(shape, format):
    """Bytes of one token's values and scales."""
    if format == "fp8":
        return shape.hidden + shape.hidden // SCALE_GROUP * SCALE_BYTES
    return 2 * shape.hidden


def pairs_matrix(shape, ids):
    """(n_ranks, n_ranks) messages from rank (line) to rank (column): one for each (token, k)."""
    return np.array([np.bincount(i.ravel() // (shape.experts // len(ids)), minlength=len(ids)) for i in ids])


def rows_matrix(shape, ids):
    """(n_ranks, n_ranks) rows from rank (line) to rank (column): one for each (token, rank with an expert of it)."""
    owners = [i // (shape.experts // len(ids)) for i in ids]
    return np.array([[int((o == rank).any(axis=1).sum()) for rank in range(len(ids))] for o in owners])


def busiest_bytes(matrix, bytes_each):
    """Bytes that the busiest rank sends to others or receives from others, whichever is more."""
    others = matrix * (1 - np.eye(len(matrix), dtype=matrix.dtype))
    return int(max(others.sum(axis=0).max(), others.sum(axis=1).max())) * bytes_each
