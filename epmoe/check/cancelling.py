"""Rows whose sums show the order of addition: in some columns nearly all of a sum cancels.

Sums of a few bf16 values are nearly always exact in float32, so random data hides the order. If v, -v and a small s are
added in this order, s remains. In another order, s loses its last bits to v.
"""

import numpy as np

from epmoe.check import random_bits

LARGE, SMALL = (19, 21), (-3, 1)  # exponents


def cancelling(rows, row_of, per_rank, seed):
    """A copy of rows, over ranks bf16 [P, hidden], where some columns cancel.

    row_of: over src_ranks, int [T, n]: rows of a token, -1 for none; column c's rows are on rank c // per_rank. Every
    fourth column shows the order of a rank's rows, the next column the order of the ranks.
    """
    out = [r.copy() for r in rows]
    for src_rank, of_token in enumerate(row_of):
        for token, column in np.argwhere(of_token >= 0):
            rank, local = divmod(int(column), per_rank)
            row = out[rank][of_token[token, column]]
            if per_rank > 1:
                row[0::4] = _part((seed, 0, src_rank, int(token), rank), local, per_rank, row[0::4])
            is_first = (of_token[token, rank * per_rank : column] < 0).all()
            row[1::4] = _part((seed, 1, src_rank, int(token), 0), rank, len(rows), row[1::4]) if is_first else 0
    return out


def _part(key, index, n, like):
    """The index-th of n terms v, -v, w, -w, ..., with v large and w small. A last term without a partner is small."""
    pair = index // 2
    exponents = LARGE if pair % 2 == 0 and index ^ 1 < n else SMALL
    v = random_bits.floats("bf16", random_bits.stream(*key, pair), like.shape[-1], exponents=exponents)
    return v.reshape(like.shape) * like.dtype.type(-1 if index % 2 else 1)
