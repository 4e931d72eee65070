"""Counts of one step: pairs and rows between ranks, the load of each rank and expert, and its imbalance."""

from typing import NamedTuple

import numpy as np


class Counts(NamedTuple):
    """The traffic of one step's routing on n_ranks.

    tokens: int64 (n_ranks,), of each src_rank. by_expert: int64 (n_experts,), pairs (token, k) of each expert.
    pairs: int64 (n_ranks, n_ranks), pairs from src_rank (line) to dst_rank (column). rows: the same, but a token counts
    once for a rank, even if several of its experts are there.
    """

    tokens: np.ndarray
    by_expert: np.ndarray
    pairs: np.ndarray
    rows: np.ndarray

    @property
    def by_rank(self):
        """Pairs that each rank receives, including its own: the work of its experts."""
        return self.pairs.sum(axis=0)


def count(ids_of_ranks, n_experts):
    """Counts of one step. ids_of_ranks: over ranks, int64 (tokens, top_k), -1 for no expert."""
    n_ranks = len(ids_of_ranks)
    local = n_experts // n_ranks
    by_expert = np.zeros(n_experts, np.int64)
    pairs, rows = np.zeros((2, n_ranks, n_ranks), np.int64)
    for src_rank, ids in enumerate(ids_of_ranks):
        by_expert += np.bincount(ids[ids >= 0], minlength=n_experts)
        owners = np.sort(np.where(ids >= 0, ids // local, -1), axis=1)
        first = np.ones(owners.shape, bool)  # the first of a token's pairs for a rank
        first[:, 1:] = owners[:, 1:] != owners[:, :-1]
        pairs[src_rank] = np.bincount(owners[owners >= 0], minlength=n_ranks)
        rows[src_rank] = np.bincount(owners[first & (owners >= 0)], minlength=n_ranks)
    return Counts(np.array([len(ids) for ids in ids_of_ranks]), by_expert, pairs, rows)


def off_rank(matrix):
    """The traffic between different ranks: the matrix without its diagonal."""
    return matrix - np.diag(np.diag(matrix))


def busiest(matrix):
    """The most that one rank sends to others or receives from others. A GPU does both at the same time."""
    crossing = off_rank(matrix)
    return int(max(crossing.sum(axis=0).max(), crossing.sum(axis=1).max()))


def max_over_mean(load):
    """1.0 if all are equal, len(load) if one has everything; None if there is no load."""
    return float(load.max() / load.mean()) if load.sum() else None


def gini(load):
    """Gini coefficient: 0 if all are equal, nearly 1 if one has everything; None if there is no load."""
    if not load.sum():
        return None
    n, in_order = len(load), np.sort(load)
    return float((2 * np.arange(1, n + 1) - n - 1) @ in_order / (n * in_order.sum()))
