"""Counts of one step: pairs and rows between ranks, load by rank and by expert, and how uneven a load is."""

from typing import NamedTuple

import numpy as np


class Counts(NamedTuple):
    """What one step's routing asks for, on n_ranks.

    tokens: int64 (n_ranks,), of each source rank. by_expert: int64 (n_experts,), (token, slot) pairs of each expert.
    pairs: int64 (n_ranks, n_ranks), pairs from src_rank (line) to dst_rank (column). rows: the same, but a token counts
    once for a rank, however many of its experts are there.
    """

    tokens: np.ndarray
    by_expert: np.ndarray
    pairs: np.ndarray
    rows: np.ndarray

    @property
    def by_rank(self):
        """Pairs that each rank receives, its own included: the work of its experts."""
        return self.pairs.sum(axis=0)


def count(ids_of_ranks, n_experts):
    """Counts of one step. ids_of_ranks: over ranks, int64 (tokens, top_k), -1 where a slot has no expert."""
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
    """What leaves its rank: the matrix without its diagonal."""
    return matrix - np.diag(np.diag(matrix))


def busiest(matrix):
    """The most that one rank sends to others or receives from others; a GPU does both at the same time."""
    crossing = off_rank(matrix)
    return int(max(crossing.sum(axis=0).max(), crossing.sum(axis=1).max()))


def max_over_mean(load):
    """1.0 if all are alike, len(load) if one has everything; None if there is nothing."""
    return float(load.max() / load.mean()) if load.sum() else None


def gini(load):
    """Gini coefficient: 0 if all are alike, nearly 1 if one has everything; None if there is nothing."""
    if not load.sum():
        return None
    n, in_order = len(load), np.sort(load)
    return float((2 * np.arange(1, n + 1) - n - 1) @ in_order / (n * in_order.sum()))
