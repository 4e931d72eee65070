"""Likely causes by place, in either phase: rows one place off, columns lost at the end.

A neighbour is the next row (1) or the previous row (-1). Rows without a neighbour are skipped.
"""

import copy

import numpy as np

from epmoe.check.compare import array
from epmoe.check.difference import bits
from epmoe.check.number_causes import matched, matched_tokens
from epmoe.check.places import places_of

NEIGHBOURS = 1, -1
MOST = 0.9  # of the elements in lost columns; some are right by chance

BESIDE = "each row holds its neighbour's payload: payloads are written, or read, one row off"
ROWS_LOST, SUMS_LOST = (
    f"the last columns of the {what} are lost: all before them is right, and they are not in any {of}"
    for what, of in (("rows", "row"), ("output", "token"))
)


def last_columns_lost(got, wrong):
    """Whether exactly the columns from some column on are wrong in all rows: other numbers, or one value everywhere.

    got [rows, columns]; wrong: which elements differ.
    """
    columns = wrong.any(axis=0)
    first = int(columns.argmax())
    if not first or wrong[:, first:].size < 2:
        return False
    found, lost = bits(got[:, first:]), wrong[:, first:]
    return bool((found == found[0, 0]).all() or (lost.any(axis=1).all() and lost.mean() > MOST))


def rows_lost(suspect):
    """Whether a dispatch's rows lack their last columns."""
    got, want = matched_tokens(suspect)
    return bool(len(got)) and last_columns_lost(got, bits(got) != bits(want))


def rows_beside(suspect):
    """Whether each row of a dispatch has its neighbour's payload."""
    got, want, pairs = bits(suspect.got), bits(suspect.want), matched(suspect)
    right = np.full(suspect.where.n_rows + 2, -1)  # the reference's row of each row, from 1 on
    right[1 + pairs[:, 0]] = pairs[:, 1]
    for by in NEIGHBOURS:
        neighbour = right[1 + pairs[:, 0] + by]
        known = neighbour >= 0
        if known.any() and (got[pairs[known, 0]] == want[neighbour[known]]).all():
            return True
    return False


def outputs_beside(total):
    """[(the same Sum, but of the neighbours of the rows it should take, bool [T]: tokens all of whose rows have one)].

    Empty if other ranks' results are not known.
    """
    round_, cfg = total.round, total.cfg
    if cfg.skip_a2a or any(result is None for result in round_.dispatched):
        return []
    made = []
    for by in NEIGHBOURS:
        other, known = copy.copy(total), np.ones(len(total.ids), bool)
        other.recv = total.recv.copy()
        for rank, result in enumerate(round_.dispatched):
            outputs = round_.expert_outputs(rank, result).astype(total.dtype)
            rows = np.flatnonzero(places_of(cfg, rank, round_.dispatched_want[rank]).src_rank == total.rank)
            token, k = array(result, "src_info")[rows].T
            there = (rows + by >= 0) & (rows + by < len(outputs))
            known[token[~there]] = False
            other.recv[token[there], k[there]] = outputs[rows[there] + by]
        made.append((other, known))
    return made
