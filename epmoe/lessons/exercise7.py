"""Exercises of lesson 7: capacities, and who is dropped."""

from itertools import product

import numpy as np

from epmoe.lessons.answers import Wrong, call, whole_numbers
from epmoe.lessons.number_questions import Number

STUB = '''
import numpy as np


def drop(topk_ids, n_experts, capacity):
    """topk_ids: int (tokens, top_k), -1 for no expert. Returns a new array, -1 for pairs beyond the capacity."""
    ...
'''

WARM_UP = Number(
    160,
    "1.25 x 1024 x 8 / 64.",
    (
        (128, "this is the mean load. The factor is missing."),
        (20, "each token has 8 pairs."),
        (16, "each token has 8 pairs, and the factor is missing."),
        (10240, "this is the capacity of all 64 experts together."),
        (1280, "there are 64 experts, not 8."),
        (102.4, "multiply by the factor."),
    ),
    "factor x tokens x top_k / n_experts.",
)


def _least(loads, spare, places):
    """The least load of the busier of two ranks, over all numbers of copies and all places."""
    best = sum(loads)
    for copies in product(range(1, spare + 2), repeat=len(loads)):
        if sum(copies) != len(loads) + spare:
            continue
        pieces = [load / n for load, n in zip(loads, copies) for _ in range(n)]
        for ranks in product((0, 1), repeat=len(pieces)):
            if sum(ranks) <= places and len(ranks) - sum(ranks) <= places:
                of_one = sum(piece for piece, rank in zip(pieces, ranks) if rank)
                best = min(best, max(of_one, sum(pieces) - of_one))
    return best


STRETCH = Number(
    _least((80, 20, 20, 20), 2, 3),
    "two copies of the hot expert, 40 on each rank, and two copies of another: 40 + 20 + 10 on both.",
    (
        (80, "40 + 20 + 20 on a rank: the second spare place can do more than that."),
        (140 / 2 - 10, "less than half of the total load of 140 is not possible."),
        (80 / 3 * 2 + 20, "three copies of the hot expert leave 73.3. Must both spare places go to the hot expert?"),
        (140, "this is the load of both ranks together."),
        (100, "the hot expert can have a copy on each rank."),
    ),
    "half of all load is the least that the busier rank can have. Is it possible? Not both copies need be of one expert.",
    close=1e-3,
)


def _cases():
    """[(topk_ids, n_experts, capacity)]."""
    rng = np.random.default_rng(7)
    drawn = np.argsort(rng.gumbel(size=(40, 6)) - np.arange(6) * 0.7, axis=1)[:, :3]
    return [
        (np.array([[0, 1], [0, 2], [0, 1], [1, 0]]), 3, 2),
        (np.array([[0, 1], [1, 0], [0, 1], [2, 0]]), 3, 1),
        (np.array([[2, -1], [-1, -1], [-1, 2], [2, 0]]), 3, 2),
        (np.array([[0, 1], [2, 3]]), 4, 1),
        (np.zeros((0, 4), int), 4, 2),
        (np.array([[3, 1], [1, 3]]), 4, 0),
        (drawn, 6, 9),
        (np.where(rng.random(drawn.shape) < 0.2, -1, drawn), 6, 11),
    ]


def dropped(ids, n_experts, capacity):
    """The right answer."""
    out, taken = ids.copy(), [0] * n_experts
    for t, k in np.ndindex(ids.shape):
        e = ids[t, k]
        if e >= 0:
            taken[e] += 1
            if taken[e] > capacity:
                out[t, k] = -1
    return out


def judge(answer):
    """What was right; raises Wrong."""
    cases = _cases()
    for ids, n_experts, capacity in cases:
        _one(ids, n_experts, capacity, call(answer, "drop", ids, n_experts, capacity))
    return (
        f"the first pairs of every expert stay in {len(cases)} routings, among them tokens without experts, a batch without "
        "tokens and a capacity of 0."
    )


def _one(ids, n_experts, capacity, got):
    got = whole_numbers(got, "drop")
    if got.shape != ids.shape:
        empty = "" if ids.size else " (a batch without tokens: begin with topk_ids.copy(), and the shape is right)"
        raise Wrong(f"drop returned an array of shape {got.shape}; it must be {ids.shape}, like topk_ids{empty}")
    right = dropped(ids, n_experts, capacity)
    if (got == right).all():
        return
    shown = f"capacity {capacity}"
    if ids.size <= 8:
        shown = f"drop({ids.tolist()}, {n_experts}, {capacity}) gave {got.tolist()}"
    raise Wrong(f"{shown}: {_why(ids, n_experts, capacity, got, right)}")


def _why(ids, n_experts, capacity, got, right):
    full = (right != ids).any(axis=1)
    backwards = dropped(ids[::-1], n_experts, capacity)[::-1]
    by_k = dropped(ids.T, n_experts, capacity).T
    of_total = ids.reshape(-1).copy()
    of_total[capacity:] = -1
    kept = [(got == e).sum() for e in range(n_experts)]
    as_last = dropped(np.where(ids < 0, n_experts - 1, ids), n_experts, capacity)
    looks = (
        (
            ids,
            "nothing is dropped. out[t, k] = -1 changes the array; `e = -1` in a loop over it, or "
            "out[mask][i:] = -1, changes only a copy.",
        ),
        (
            np.where(ids < 0, -1, as_last),
            "-1 means no expert and takes no room; here it is counted for the last expert.",
        ),
        (dropped(ids, n_experts, capacity - 1), "an expert may keep `capacity` pairs, not one fewer."),
        (dropped(ids, n_experts, capacity + 1), "an expert keeps one pair too many."),
        (backwards, "the LAST tokens keep their pairs; it must be the first."),
        (by_k, "this goes through all first choices (k = 0), then all second ones. Go token by token."),
        (np.where(full[:, None], -1, ids), "a token that loses one pair keeps the others."),
        (of_total.reshape(ids.shape), "this counts all pairs together; each expert has a capacity of its own."),
    )
    for value, says in looks:
        if (got == value).all():
            return says
    if ((got != ids) & (got != -1)).any():
        t, k = np.argwhere((got != ids) & (got != -1))[0]
        return (
            f"token {t}, k = {k} was expert {ids[t, k]} and became {got[t, k]}. A pair stays as it is, or becomes -1."
        )
    if max(kept, default=0) > capacity:
        e = int(np.argmax(kept))
        return f"expert {e} keeps {kept[e]} pairs."
    t, k = np.argwhere(got != right)[0]
    if got[t, k] == -1:
        return f"token {t}, k = {k} is dropped, though expert {ids[t, k]} has room. Neither -1 nor a dropped pair takes room."
    return f"token {t}, k = {k} must be dropped."
