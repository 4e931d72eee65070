"""Sums in a fixed order: float32, from +0.0, one term after the other."""

import numpy as np

from ..casts import to_float32


def zero_sums(n_tokens: int, width: int) -> np.ndarray:
    """Sums before the first term: +0.0, float32 [n_tokens, width]."""
    return np.zeros((n_tokens, width), np.float32)


def add(total: np.ndarray, terms: np.ndarray) -> None:
    """Add one term to each total, in float32, in place. total: float32. terms: bf16, fp16 or float32, same shape."""
    with np.errstate(invalid="ignore", over="ignore"):  # Inf - Inf and overflow are valid results
        total += to_float32(terms)


def add_rows(total: np.ndarray, row_of: np.ndarray, rows: np.ndarray) -> None:
    """Add to each token its row, in float32, in place. A token whose row is -1 is left alone.

    total: float32 [T, width]. row_of: int [T]. rows: bf16, fp16 or float32 [N, width]. Rows that no token names are not
    read, so they may be NaN.
    """
    tokens = np.flatnonzero(row_of >= 0)
    with np.errstate(invalid="ignore", over="ignore"):
        total[tokens] += to_float32(rows[row_of[tokens]])
