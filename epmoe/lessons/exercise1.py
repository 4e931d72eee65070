"""Exercises of lesson 1: row_offsets and the beginnings of segments, out of counts."""

from math import comb

import numpy as np

from epmoe.lessons.answers import Wrong, call, whole_numbers
from epmoe.lessons.number_questions import Number

STUB = '''
import numpy as np


def row_offsets(counts):
    """counts: (n_local_experts, n_ranks). Returns n_local_experts + 1 integers."""
    ...


def first_row(counts, local_expert, src_rank):
    """The row at which the rows from src_rank for local_expert begin, an integer."""
    ...
'''

WARM_UP = Number(
    43 // (64 // 8),
    "each rank has 64 / 8 = 8 neighbouring experts, and 43 // 8 = 5.",
    (
        (43 % 8, "experts are not dealt out in turn; the first 8 live on rank 0, the next 8 on rank 1."),
        (6, "ranks are counted from 0."),
        (43 / 8, "a rank is a whole number: round down."),
        (43 % 64 // 4, "there are 64 / 8 = 8 experts on each rank."),
    ),
    "how many experts has a rank, and how often does that go into 43?",
)
STRETCH = Number(
    4 * (1 - comb(6, 2) / comb(8, 2)),
    "a rank is missed if both experts are among the 6 others, with probability 15/28, so a token visits 4 x 13/28.",
    (
        (2, "two experts of a token may live on one rank."),
        (4 * (1 - (3 / 4) ** 2), "this draws the two experts independently; they are different experts."),
        (4 * comb(6, 2) / comb(8, 2), "this is the number of ranks that it does NOT visit."),
        (1 + 1 / 7, "the second expert is on the SAME rank with probability 1/7; then the token visits 1 rank."),
    ),
    "with which probability is one given rank missed?",
    close=2e-3,
)

CASES = (
    [[3, 2], [1, 4]],
    [[0, 0, 5], [0, 0, 0], [2, 0, 1], [0, 7, 0]],
    [[6]],
    [[0, 0]],
    [[1, 2, 3, 4]],
    np.random.default_rng(1).integers(0, 9, (32, 8)).tolist(),
    [[1 << 30, 1 << 30], [1 << 30, 7]],  # int32 does not hold these
    [[(1 << 53) + 1, 2], [1, 0]],  # nor does float64
)


def judge(answer):
    """What was right; raises Wrong."""
    for case in CASES:
        counts = np.array(case)
        _offsets(counts, call(answer, "row_offsets", counts))
        for e, src in np.ndindex(counts.shape):
            _first(counts, e, src, call(answer, "first_row", counts, e, src))
    return (
        f"row_offsets and first_row agree with the rows of {len(CASES)} worlds, with experts that get nothing and "
        "with a world of one rank."
    )


def _offsets(counts, got):
    per_expert = counts.sum(axis=1)
    right = np.concatenate([[0], np.cumsum(per_expert)])
    got = whole_numbers(got, "row_offsets").reshape(-1)
    if np.array_equal(got, right):
        return
    shown = (
        f"row_offsets({counts.tolist()}) gave {got.tolist()}"
        if counts.size < 20
        else f"row_offsets gave {len(got)} numbers for {len(counts)} local experts x {counts.shape[1]} ranks"
    )
    for looks, says in (
        (
            right[1:],
            "the 0 at the front is missing: local expert 0 begins at row 0 ([0] + an array adds 0 to each of its "
            "numbers; np.concatenate joins them)",
        ),
        (
            right[:-1],
            "the last number is missing: where the last expert's rows end, which is how many rows there are in all",
        ),
        (
            np.concatenate([[0], per_expert]),
            "these are the counts of each expert, not yet added up: an expert begins where the one before it ends",
        ),
        (per_expert, "these are the counts of each expert, not yet added up, and without a 0 at the front"),
        (
            np.concatenate([[0], np.cumsum(counts.sum(axis=0))]),
            "the sums are over experts; rows of one expert from ALL ranks lie together, so sum over the ranks",
        ),
        (
            np.concatenate([[0], np.cumsum(counts)]),
            "this is one number for each (expert, rank) segment; asked for is one for each expert",
        ),
    ):
        if np.array_equal(got, looks):
            raise Wrong(f"{shown}: {says}.")
    if got.shape != right.shape:
        raise Wrong(f"{shown}: with {len(counts)} local experts there must be {len(right)} numbers.")
    e = int(np.argmax(got != right))
    _refuse_wrapped(shown, got[e], right[e])
    raise Wrong(f"{shown}: row_offsets[{e}] must be {right[e]}, the number of rows of all local experts before {e}.")


def _refuse_wrapped(shown, got, right):
    if (got - int(right)) % (1 << 32) == 0:
        raise Wrong(f"{shown} and must give {right}: the sum has wrapped; 32 bits do not hold it.")
    if got == int(float(right)):
        raise Wrong(f"{shown} and must give {right}: a float does not hold such a number; add integers.")


def _first(counts, e, src, got):
    before = int(counts[:e].sum())
    right = before + int(counts[e, :src].sum())
    got = whole_numbers(got, "first_row")
    if got.size != 1:
        raise Wrong(f"first_row must return one number, not {got.tolist()!r}")
    got = got.reshape(-1)[0]
    if got == right:
        return
    shown = f"first_row(counts, {e}, {src}) gave {got}"
    if counts.size < 20:
        shown += f" for counts = {counts.tolist()}"
    _refuse_wrapped(shown, got, right)
    if got == before and src:
        raise Wrong(
            f"{shown}: that is where local expert {e} begins; the rows from ranks before rank {src} for the "
            "same expert come first."
        )
    if got == int(counts[e, :src].sum()):
        raise Wrong(f"{shown}: the rows of the local experts before {e} are not counted.")
    if got == right + int(counts[e, src]):
        raise Wrong(f"{shown}: that is where the segment ends, not where it begins.")
    if got == int(counts[:, :src].sum()) + int(counts[:e, src].sum()):
        raise Wrong(f"{shown}: this sorts by rank first and by expert inside; it is the other way round.")
    raise Wrong(
        f"{shown} and must give {right}: {before} rows of experts before it, and "
        f"{right - before} of this expert from ranks before rank {src}."
    )
