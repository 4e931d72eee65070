"""Exercises of lesson 6: the floors of a routing, and which layout to take."""

from math import comb

import numpy as np

from epmoe.lessons.answers import Wrong, call
from epmoe.lessons.number_questions import Number

STUB = '''
import numpy as np


def decide(topk_ids, n_ranks, n_experts, row_bytes, link_gbps, extra_us):
    """(floor of pairs in us, floor of rows in us, "pairs" or "rows")."""
    ...
'''

WARM_UP = Number(
    64 * 8 // 2 * 14336,
    "64 x 8 = 512 pairs, half of them to the other rank, 14336 bytes each.",
    (
        (64 * 8 * 14336, "half of the pairs stay at home, and cross no link."),
        (64 * 14336, "each token has 8 pairs, and half of them leave."),
        (64 * 8 // 2 * 7168, "rows have 14336 bytes: 7168 numbers of 2 bytes."),
        (64 * 8 // 2, "this is the number of pairs; the question is about bytes."),
        (64 * 14336 / 2, "each token has 8 pairs."),
        (3.67, "the answer is in bytes."),
    ),
    "pairs of a rank, times the share that leaves, times bytes.",
)


def _half():
    """The first top_k at which a token visits at most top_k / 2 of 8 ranks."""
    k = 1
    while 8 * (1 - comb(224, k) / comb(256, k)) > k / 2:
        k += 1
    return k


STRETCH = Number(
    _half(),
    "8 x (1 - C(224, k) / C(256, k)) ranks are visited, and from here on that is at most k / 2.",
    (
        (16, "with 16 even a token that visits all 8 ranks makes half as many rows; but already below most miss some."),
        (_half() - 1, "just above half: compute it to two digits."),
        (8, "8 experts visit 5.3 of 8 ranks."),
        (2, "two experts are rarely on one of 8 ranks."),
        (4, "a token with 4 experts visits 3.3 of 8 ranks."),
    ),
    "ranks_visited() of the lesson, with top_k as a variable and 8 ranks, against top_k / 2.",
)


def _cases():
    """[(what it is, topk_ids, n_ranks, n_experts, row_bytes, link_gbps, extra_us)]."""
    rng = np.random.default_rng(6)

    def ids(tokens, n_experts, top_k, popularity=0.0):
        return [np.argsort(-(popularity + rng.gumbel(size=(n, n_experts))), axis=1)[:, :top_k] for n in tokens]

    one_hot = np.zeros(16)
    one_hot[5] = 9.0
    with_gaps = [np.where(rng.random(i.shape) < 0.3, -1, i) for i in ids((40, 30, 50), 12, 4)]
    return [
        ("4 ranks, every expert alike", ids((128,) * 4, 256, 8), 4, 256, 14336, 358.0, 10.0),
        ("the same with slow sums", ids((128,) * 4, 256, 8), 4, 256, 14336, 358.0, 25.0),
        ("a rank with most of the tokens", ids((90, 5, 0, 8), 16, 3), 4, 16, 4096, 100.0, 0.1),
        ("an expert that everybody wants", ids((40,) * 4, 16, 2, one_hot), 4, 16, 4096, 100.0, 0.2),
        ("empty slots", with_gaps, 3, 12, 1024, 50.0, 0.05),
        ("one expert a token", ids((64,) * 4, 16, 1), 4, 16, 7168, 358.0, 0.0),
        ("one rank", ids((10,), 8, 2), 1, 8, 4096, 358.0, 1.0),
        ("messages of 64 MiB", ids((64,) * 4, 16, 4), 4, 16, 1 << 26, 358.0, 0.1),  # more bytes than 32 bits hold
    ]


def matrices(topk_ids, n_ranks, n_experts):
    """(pairs, rows): messages from rank (line) to rank (column)."""
    local = n_experts // n_ranks
    owners = [np.where(ids >= 0, ids // local, -1) for ids in topk_ids]
    pairs = np.array([[(o == dst).sum() for dst in range(n_ranks)] for o in owners])
    rows = np.array([[(o == dst).any(axis=1).sum() for dst in range(n_ranks)] for o in owners])
    return pairs, rows


def busiest(matrix):
    """The most that a rank sends to others or receives from others."""
    others = matrix * (1 - np.eye(len(matrix), dtype=int))
    return max(others.sum(axis=0).max(), others.sum(axis=1).max())


def judge(answer):
    """What was right; raises Wrong."""
    chosen = [_one(answer, *case) for case in _cases()]
    return (
        f"floors and choices are right in {len(chosen)} worlds, for rows in {chosen.count('rows')} of them: uneven "
        "ranks, a popular expert, empty slots, and one expert a token, where rows save nothing."
    )


def _one(answer, name, topk_ids, n_ranks, n_experts, row_bytes, gbps, extra_us):
    pairs, rows = matrices(topk_ids, n_ranks, n_experts)
    right = [busiest(m) * row_bytes / gbps / 1e3 for m in (pairs, rows)]
    best = "rows" if right[1] + extra_us < right[0] else "pairs"
    got = call(answer, "decide", topk_ids, n_ranks, n_experts, row_bytes, gbps, extra_us)
    try:
        *floors, choice = got
        floors = [float(f) for f in floors]
    except (TypeError, ValueError):
        floors, choice = [], None
    if len(floors) != 2:
        raise Wrong(f"decide must return three things, (pairs_us, rows_us, choice), not {got!r}")
    for layout, matrix, us, wanted in zip(("pairs", "rows"), (pairs, rows), floors, right):
        if not np.isclose(us, wanted, rtol=1e-6, atol=1e-9):
            says = _why(us / (row_bytes / gbps / 1e3), layout, matrix, topk_ids, n_ranks, n_experts) or (
                f"the busiest way carries {busiest(matrix)} of {int(matrix.sum())} messages of {row_bytes} bytes, at "
                f"{gbps} GB/s"
            )
            raise Wrong(f"{name}: the floor of {layout} came out as {us:.6g} us and is {wanted:.6g} us: {says}.")
    if choice != best:
        if choice not in ("pairs", "rows"):
            raise Wrong(f'{name}: the choice is {choice!r} and must be "pairs" or "rows"')
        equal = ", and equal times mean pairs" if right[1] + extra_us == right[0] else ""
        raise Wrong(
            f"{name}: pairs take {right[0]:.2f} us and rows {right[1]:.2f} + {extra_us} us{equal}, so the choice is "
            f"{best}, not {choice}"
        )
    return best


def _why(messages, layout, matrix, topk_ids, n_ranks, n_experts):
    """What the wrong floor looks like, as a number of messages; "" if like nothing known."""
    others = matrix * (1 - np.eye(len(matrix), dtype=int))
    filled = [np.where(ids < 0, ids + n_experts, ids) for ids in topk_ids]
    tokens = np.array([[len(ids)] * n_ranks for ids in topk_ids])
    pairs, rows = matrices(topk_ids, n_ranks, n_experts)
    most = busiest(matrix)
    looks = (
        (most * 1e3, "this is in nanoseconds; GB/s are bytes a nanosecond"),
        (most / 1e3, "this is in milliseconds"),
        (most / 1e6, "this is in seconds"),
        (
            len(others) * others.sum(axis=0).max(),
            "all lines of the matrix are one list: [[0] * n] * n repeats it, and np.zeros((n, n), int) does not",
        ),
        (most * 1e9 / 2**30, "G is 10**9 here, not 2**30"),
        (
            max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()),
            "what a rank sends to itself is counted too, and crosses no link",
        ),
        (others.sum(axis=1).max(), "only the ways out are looked at; here a rank receives more than any sends"),
        (others.sum(axis=0).max(), "only the ways in are looked at; here a rank sends more than any receives"),
        (others.sum(), "this is what all ranks send together; their links work at the same time"),
        (others.sum() / n_ranks, "this is the average rank; the busiest one decides"),
        (
            (others.sum(axis=0) + others.sum(axis=1)).max(),
            "out and in are added; they work at the same time, the larger one counts",
        ),
        (
            busiest(matrices(filled, n_ranks, n_experts)[layout == "rows"]),
            "-1 is an empty slot, and here it is counted as an expert",
        ),
        (
            busiest(rows if layout == "pairs" else pairs),
            "this is the floor of the other layout: pairs send one message for each (token, k), rows one for each "
            "(token, rank with an expert of it)",
        ),
        (busiest(tokens), "not every token goes to every rank"),
        (most * 2, "this counts bytes twice: row_bytes is bytes, not numbers"),
    )
    seconds = "in seconds, and "
    return next(
        (
            unit + says
            for unit, n in (("", messages), (seconds, messages * 1e6))
            for value, says in looks
            if np.isclose(n, value, rtol=1e-6)
        ),
        "",
    )
