"""Exercises of lesson 10: what crosses the network."""

from math import comb

import numpy as np

from epmoe.lessons.answers import Wrong, call
from epmoe.lessons.number_questions import Number

STUB = '''
import numpy as np


def network_floors(topk_ids, n_ranks, n_experts, ranks_per_host, row_bytes, net_gbps):
    """(us of pairs, us of rows, us of one copy per host) over the network."""
    ...
'''

WARM_UP = Number(
    2,
    "ranks 9, 11 and 12 are on host 1, ranks 30 and 31 on host 3. Ranks 0 and 5 are on the token's own host.",
    (
        (3, "ranks 0 and 5 are on the host of rank 2: nothing crosses the network for them."),
        (6, "these are the pairs; one copy for each host is enough."),
        (5, "these are the ranks; one copy for each host is enough."),
        (8, "these are all pairs; one copy for each OTHER host is enough."),
        (7, "these are all ranks; one copy for each OTHER host is enough."),
        (1, "ranks 9 to 12 and ranks 30 and 31 are on two hosts."),
    ),
    "divide each rank by 8, and count the different hosts besides the token's own.",
)
_MISSED = comb(64, 8) / comb(128, 8)  # all 8 experts on the other one of two hosts
STRETCH = Number(
    2 * 3 / 4 * (1 - _MISSED),
    "of the 2 hosts that were picked 1.5 are other hosts on average, and each is missed with probability "
    "C(64, 8) / C(128, 8).",
    (
        (1.5, "a host that was picked may get no expert: with probability C(64, 8) / C(128, 8)."),
        (2 * (1 - _MISSED), "the token's own host needs no copy, and is picked half of the time."),
        (2, "the token's own host needs no copy, and a host that was picked may get no expert."),
        (1 - _MISSED, "the rank's own host is picked half of the time, not always."),
        (3 * (1 - comb(192, 8) / comb(256, 8)), "this is without the limit of 2 hosts."),
        (1.5 * (1 - 0.5**8), "the experts of a token are different: draw without putting back."),
        (1.5 * _MISSED, "this is how many of the picked hosts are MISSED."),
    ),
    "how many of the 2 picked hosts are others, and how likely does one of them get no expert?",
    close=5e-4,
)


def matrices(topk_ids, n_ranks, n_experts, per_host, *, others=True, keep_local=True):
    """Copies from card to card for (pairs, rows, one per host), each (n_ranks, n_ranks)."""
    local = n_experts // n_ranks
    found = np.zeros((3, n_ranks, n_ranks), int)
    for src, ids in enumerate(topk_ids):
        for token in ids.tolist():
            ranks = [e // local for e in token if e >= 0]
            if others:
                ranks = [r for r in ranks if r // per_host != src // per_host]
            for r in ranks:
                found[0, src, r] += 1
            for r in set(ranks):
                found[1, src, r] += 1
            for host in {r // per_host for r in ranks}:
                found[2, src, host * per_host + (src % per_host if keep_local else 0)] += 1
    return found


def busiest(matrix):
    """The most that one card sends or receives."""
    return max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())


def _cases():
    """[(what it is, topk_ids, n_ranks, n_experts, ranks_per_host, row_bytes, net_gbps)]."""
    rng = np.random.default_rng(10)

    def ids(tokens, n_experts, top_k, popularity=0.0):
        return [np.argsort(-(popularity + rng.gumbel(size=(n, n_experts))), axis=1)[:, :top_k] for n in tokens]

    hot = np.zeros(16)
    hot[13] = 6.0
    gaps = [np.where(rng.random(i.shape) < 0.3, -1, i) for i in ids((30, 0, 9, 12), 8, 3)]
    return [
        ("4 hosts of 2 ranks", ids((16,) * 8, 32, 6), 8, 32, 2, 7168, 50.0),
        ("2 hosts of 2 ranks", ids((32,) * 4, 16, 4), 4, 16, 2, 14336, 50.0),
        ("one rank with many tokens", ids((60, 3, 5, 4, 0, 2), 12, 3), 6, 12, 3, 4096, 25.0),
        ("an expert that all want", ids((30,) * 4, 16, 2, hot), 4, 16, 2, 4096, 50.0),
        ("tokens with fewer experts", gaps, 4, 8, 2, 1024, 10.0),
        ("one host", ids((8, 8), 8, 2), 2, 8, 2, 4096, 50.0),
        ("a rank on each host", ids((8, 9, 7), 9, 4), 3, 9, 1, 4096, 50.0),
        ("a host that all want", ids((20,) * 8, 16, 2, hot), 8, 16, 2, 4096, 50.0),
    ]


def judge(answer):
    """What was right; raises Wrong."""
    cases = _cases()
    for case in cases:
        _one(case, call(answer, "network_floors", *case[1:]))
    return f"all three floors are right in {len(cases)} worlds of one to four hosts."


def _one(case, got):
    name, topk_ids, n_ranks, n_experts, per_host, row_bytes, gbps = case
    found = matrices(topk_ids, n_ranks, n_experts, per_host)
    each = row_bytes / gbps / 1e3
    try:
        got = [float(us) for us in got]
    except (TypeError, ValueError):
        got = []
    if len(got) != 3:
        raise Wrong("network_floors must return three numbers: for pairs, for rows, per host")
    for way, what, us, matrix in zip(range(3), ("pairs", "rows", "one copy per host"), got, found):
        if not np.isclose(us, busiest(matrix) * each, rtol=1e-6, atol=1e-9):
            raise Wrong(
                f"{name}: the floor of {what} came out as {us:.6g} us and is {busiest(matrix) * each:.6g} us: "
                f"{_why(way, us / each, case)}."
            )


def _why(way, copies, case):
    _, topk_ids, n_ranks, n_experts, per_host, *_ = case
    right = matrices(topk_ids, n_ranks, n_experts, per_host)
    matrix = right[way]
    with_own = matrices(topk_ids, n_ranks, n_experts, per_host, others=False)[way]
    off_rank = with_own - np.diag(np.diag(with_own))
    filled = [np.where(i < 0, i + n_experts, i) for i in topk_ids]
    looks = [
        (busiest(with_own), "copies for the token's own host are counted, and they do not cross the network"),
        (busiest(off_rank), "copies to other ranks of the same host are counted; they go over NVLink"),
        (matrix.sum(axis=1).max(), "only what cards send is looked at; here one receives more"),
        (matrix.sum(axis=0).max(), "only what cards receive is looked at; here one sends more"),
        (matrix.sum(), "this is what all cards send together; they work at the same time"),
        (matrix.sum() / n_ranks, "this is the average card; the busiest one decides"),
        (busiest(matrix) * 1e3, "this is in nanoseconds"),
        (busiest(matrix) / 1e6, "this is in seconds"),
        (busiest(matrix) * 8, "net_gbps is in bytes, not in bits"),
        (
            busiest(matrices(filled, n_ranks, n_experts, per_host)[way]),
            "-1 means no expert, and here it is counted as one",
        ),
        *(
            (busiest(right[other]), f"this is the floor of {name}")
            for other, name in enumerate(("pairs", "rows", "one copy per host"))
            if other != way
        ),
    ]
    if way == 2:
        by_host = matrix.reshape(n_ranks // per_host, per_host, n_ranks).sum(axis=1)
        at_first = matrices(topk_ids, n_ranks, n_experts, per_host, keep_local=False)[2]
        looks = [
            (
                busiest(at_first),
                "all copies for a host arrive at its first rank; they must arrive at the rank with the sender's "
                "local number",
            ),
            (by_host.sum(axis=1).max(), "a host has as many cards as ranks; this counts them as one"),
            *looks,
        ]
    for value, says in looks:
        if np.isclose(copies, value, rtol=1e-6):
            return says
    return f"the busiest card carries {busiest(matrix)} of {int(matrix.sum())} copies"
