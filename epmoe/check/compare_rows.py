"""Comparison for fused_a2a: one row for each (token, dst_rank), by src_rank, then token. The order of rows is fixed."""

from dataclasses import replace

import numpy as np

from epmoe.check.causes import best
from epmoe.check.compare import compare_combined, same_type
from epmoe.check.difference import Difference, as_array, bits, form, shown
from epmoe.check.seen_causes import of_rows, of_sums

ORDER = "recv_x has one row for each (source token, this rank), by src_rank, then token"
SUM = "combined_x[t] = sum over ranks ascending, in float32 from +0, rounded once; zeros for a token that went nowhere"


def pair_of(rows):
    """Rows and their scales, if they are a pair (e4m3, float32 scales); else (rows,)."""
    return tuple(rows) if isinstance(rows, (tuple, list)) and len(rows) == 2 else (rows,)


def compare_received(rank, rows, got, want):
    """Differences between one rank's (recv_x, recv_token_indices, recv_token_probs, tokens_per_expert) and the
    reference's. rows int64 [N, 2] is the (src_rank, token) of every row."""
    names = ["tokens_per_expert", "recv_token_indices", "recv_token_probs", "recv_x", "recv_x_scales"]
    indices, n_parts = want[1], len(pair_of(want[0]))
    if n_parts == 2 and len(pair_of(got[0])) == 1:
        says, rule = "is no pair", "recv_x has the form of x: a pair (e4m3 [N, H], float32 scales [N, H / 128])"
        return [Difference("recv_x", says, got[0], want[0], rank, rule=rule)]
    got, want = ((x[3], x[1], x[2], *(pair_of(x[0]) if n_parts == 2 else x[:1])) for x in (got, want))
    found = []
    for name, a, b in zip(names, got, want):
        a, b = as_array(a), as_array(b)
        if a.shape != b.shape or not same_type(a, b):
            says, rule = f"is {form(a)}, reference {form(b)}", ORDER if name == "recv_x" else ""
            found.append(Difference(name, says, a, b, rank, rule=rule))
            continue
        different = bits(a) != bits(b)
        if different.any():
            found.append(_first(rank, rows, name, a, b, different, indices))
    return found


def _first(rank, rows, name, got, want, different, indices):
    at = tuple(int(i) for i in np.argwhere(different)[0])
    says = f"is {shown(got[at])}, reference {shown(want[at])}; first of {int(different.sum())} differing elements"
    if name == "tokens_per_expert":
        rule = "the number of (row, k) pairs that a local expert has"
        return Difference(name, says, got, want, rank, rule=rule, column=at[0])
    place = dict(row=at[0]) | _source(rows, at[0])
    place["k" if name.startswith("recv_token") else "column"] = at[1]
    rule = {
        "recv_x": ORDER,
        "recv_x_scales": "each row has the scales of its token, one for 128 columns",
        "recv_token_indices": "local ids, each at its k; -1 where the expert is on another rank",
        "recv_token_probs": "0.0 where there is no expert of this rank",
    }[name]
    cause = ""
    if name == "recv_token_probs" and int(indices[at]) == -1:
        cause = "prob not zero where the id is -1"
    elif name == "recv_x":
        cause = best(of_rows(np.ascontiguousarray(got).view(want.dtype), want))
    return Difference(name, says, got, want, rank, rule=rule, cause=cause, **place)


def compare_combined_rows(rank, got, want, of_rows, row_of, name="combined_x"):
    """Differences between one rank's combined_x, or another sum over a token's rows, and the reference's.

    of_rows: over ranks, the rows that were summed. row_of: int [T, R], the token's row on each rank, or -1.
    """
    found = [replace(d, what=name, rule=SUM) for d in compare_combined(None, rank, got, want)]
    if found and found[0].token is not None:
        got = np.ascontiguousarray(got).view(want.dtype)
        return [found[0].because(best(_other_sums(got, of_rows, row_of) or of_sums(got, want)))]
    return found


@np.errstate(all="ignore")
def _other_sums(got, of_rows, row_of):
    """Causes: common mistakes that give exactly these sums."""

    def summed(ranks, dtype):
        total = np.zeros(got.shape, np.float32)
        for rank in ranks:
            has = row_of[:, rank] >= 0
            total[has] += of_rows[rank][row_of[has, rank]].astype(np.float32)
            total = total.astype(dtype).astype(np.float32)
        return total.astype(got.dtype)

    n_ranks = row_of.shape[1]
    mistakes = {
        "the ranks are added in descending order": summed(reversed(range(n_ranks)), np.float32),
        "the sum is rounded after each rank; it stays float32 until the end": summed(range(n_ranks), got.dtype),
    }
    return [words for words, sums in mistakes.items() if not compare_combined(None, 0, got, sums)]


def compare_prob_gradients(rank, got, want):
    """Differences between one rank's gradient of token_probs and the reference's."""
    rule = "grad_token_probs[t, k] = sum over the token's ranks ascending, in float32, of its rows' gradients"
    return [
        replace(d, what="grad_token_probs", k=d.column, column=None, rule=rule)
        for d in compare_combined(None, rank, got, want)
    ]


def compare_rows_back(rank, rows, got, want):
    """Differences between one rank's gradient of combine's rows and the reference's. rows: as in compare_received."""
    rule = "combine's gradient is dispatch again: each row the bytes of the token it came from"
    return [
        replace(d, what="grad_x of combine", rule=rule, row=d.token, **_source(rows, d.token))
        for d in compare_combined(None, rank, got, want)
    ]


def _source(rows, row):
    """Where a row came from, {src_rank, token}; row None: nowhere."""
    if row is None:
        return {}
    return dict(src_rank=int(rows[row, 0]), token=int(rows[row, 1]))
