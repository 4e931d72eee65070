"""Values for which number formats and arithmetic differ: signed zeros, subnormals, NaN, infinities, overflow, ties.

They replace some groups of 16 columns of random data, so that a mistake with one of them can be recognised.
"""

import ml_dtypes
import numpy as np

from epmoe.check import random_bits


def edge_tokens(tokens, seed):
    """Overwrite some groups of 16 columns with values for which number formats differ, and two tokens as a whole.

    No group of those two tokens has a large element, for any group size: zeros, and numbers below a format's floor.
    """
    tokens = tokens.copy()
    n, hidden = tokens.shape
    kinds = random_bits.words(seed, n * (hidden // 16)).reshape(n, hidden // 16) % np.uint64(12)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
    fillings = {
        0: np.zeros(16, np.float32),
        1: np.full(16, -0.0, np.float32),
        2: np.tile(ties, 2) * np.repeat(np.float32([1, -1]), 8),  # halfway between e2m1 codes
        3: np.arange(16).astype(np.float32) * np.float32(2.0**-133),  # bf16 subnormals
        4: np.where(np.arange(16) == 5, np.float32("nan"), np.float32(1.5)),
        5: np.where(np.arange(16) == 9, np.float32("inf"), np.float32(-2)),
        6: np.float32(448) + np.arange(16).astype(np.float32) * 16,  # around the largest e4m3
        7: np.float32(2.0**100) * (1 + np.arange(16).astype(np.float32)),
    }
    groups = tokens.reshape(n, hidden // 16, 16)
    for kind, values in fillings.items():
        groups[kinds == np.uint64(kind)] = values.astype(ml_dtypes.bfloat16)
    groups[1:2] = 0
    groups[2:3] = np.float32(2.0**-20) * (1 + np.arange(16, dtype=np.float32)) / 16
    return groups.reshape(n, hidden)


def edge_nans(tokens):
    """A copy whose first three columns are NaN of other bits: signalling, negative, and both. They must arrive as is."""
    tokens = tokens.copy()
    info = ml_dtypes.finfo(tokens.dtype)
    words = tokens.view(f"u{info.bits // 8}")
    infinity, negative = np.array([np.inf, -np.inf], tokens.dtype).view(words.dtype)
    words[:, :3] = [infinity | 1, negative | 1 << info.nmant - 1 | 1, negative | 1]
    return tokens


def edge_weights(weights):
    """Change router weights float32 [T, top_k] in place: one becomes zero, and one token's weights all negative."""
    weights[3:4, 0] = 0
    weights[5:6] *= -1


def edge_outputs(outputs, seeds, token, k):
    """Change experts' outputs [..., hidden] in place.

    seeds: uint64 [...] of (src_rank, token), so that all k of a token have their edges in the same columns.
    token, k: int [...]. The pair with the zero weight gets an infinity, so the product is NaN.
    """
    kinds = random_bits.words(seeds, outputs.shape[-1] // 16) % np.uint64(12)
    token, k = (np.broadcast_to(x, kinds.shape[:-1]) for x in (token, k))
    kinds[token == 3, 0] = 3
    of, column, even = ml_dtypes.finfo(outputs.dtype), np.arange(16), k[..., None] % 2 == 0
    plain = np.float32(1.5)
    fillings = {
        0: np.float32(-0.0),  # their sum begins at +0 and stays there
        1: (column * of.smallest_subnormal).astype(np.float32),
        2: np.where((column == 5) & (k[..., None] == 0), np.float32("nan"), plain),
        3: np.where((column == 9) & (k[..., None] == 0), np.float32("inf"), -plain),
        4: np.where(column == 9, np.where(even, np.float32("inf"), np.float32("-inf")), plain),  # NaN
        5: of.max.astype(np.float32),  # overflows where weights allow it
    }
    groups = outputs.reshape(*outputs.shape[:-1], -1, 16)
    for kind, values in fillings.items():
        values = np.broadcast_to(values, (*k.shape, 16))[..., None, :].astype(outputs.dtype)
        groups[...] = np.where((kinds == np.uint64(kind))[..., None], values, groups)


def edge_rows(rows, row_of, seed):
    """Copies of rows, over ranks bf16 [P, hidden], with edges in the same columns of all rows of a token.

    row_of: over src_ranks, int [T, n]: rows of a token, -1 for none; column c's rows are on rank c * ranks // n.
    """
    out = [r.copy() for r in rows]
    for src_rank, of_token in enumerate(row_of):
        for token, columns in enumerate(of_token >= 0):
            for k, column in enumerate(np.flatnonzero(columns)):
                row = out[int(column) * len(rows) // of_token.shape[1]][of_token[token, column]]
                edge_outputs(row, random_bits.stream(seed, src_rank, token), token, k)
    return out
