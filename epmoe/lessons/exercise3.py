"""Exercises of lesson 3: slots by prefix sums."""

import numpy as np

from epmoe.lessons.answers import Wrong, call, whole_numbers
from epmoe.lessons.number_questions import Number

STUB = '''
import numpy as np


def first_slots(counts):
    """counts: (n_blocks, n_experts). Returns the first slot of each block for each expert."""
    ...


def own_slots(experts, first):
    """experts: ids of this block's pairs, -1 for none. first: its first slot for each expert. Returns a list."""
    ...
'''

WARM_UP = Number(
    4 + 0 + 3,
    "the blocks before block 3 have 4 + 0 + 3 pairs.",
    (
        (12, "this counts the block's own 5 pairs too: the first slot comes after the blocks BEFORE it."),
        (5, "this is the number of the block's own pairs."),
        (3, "add up all blocks before it, not only the last one."),
        (8, "slots are counted from 0."),
        (6, "slots are counted from 0: 7 slots are taken before it, numbers 0 to 6."),
    ),
    "add up the pairs of the blocks before it.",
)
STRETCH = Number(
    2,
    "both load 0. One claims nine times. The other stores 1. The first one loads that 1 for its last claim and waits, "
    "the other makes its nine claims, and then the first one stores 2.",
    (
        (20, "that is the LARGEST number, where nothing is lost."),
        (10, "if every claim met another; but one late store can wipe out many claims."),
        (11, "a late store can wipe out many claims, and then the other thread can do the same."),
        (
            1,
            "to store 1 a thread must have loaded 0, so it is that thread's first claim or the other has stored "
            "nothing yet. The last store of all comes from a tenth claim, and its load saw at least a 1.",
        ),
        (0, "whoever stores adds 1 to what it has loaded."),
    ),
    "which store is the last one, and what is the least that its load can have seen?",
)

N_EXPERTS = 6


def judge(answer):
    """What was right; raises Wrong."""
    rng = np.random.default_rng(3)
    large = np.array([[1 << 31, (1 << 53) + 1], [1 << 31, 2], [1, 1]])
    for counts in (np.array([[2, 1], [0, 3], [4, 1]]), np.array([[5, 0, 2]]), rng.integers(0, 9, (7, 5)), large):
        _first(counts, call(answer, "first_slots", counts))
    for experts, first in (
        ([1, 0, 1, 1, -1, 0], [10, 20]),
        ([], [3, 4]),
        ([-1, -1], [0, 0]),
        ([2, 2, 2], [5, 5, 0]),
        ([0, 0, 1], [(1 << 31) - 1, (1 << 53) + 1]),
    ):
        _own(experts, first, call(answer, "own_slots", experts, np.array(first)))
    pairs = rng.integers(-1, N_EXPERTS, 64).tolist()
    for n_blocks in (1, 3, 8):
        _together(answer, pairs, np.array_split(pairs, n_blocks))
    return "every expert's pairs are numbered 0, 1, 2, ... in order, whether 1, 3 or 8 blocks share the work."


def _array(got, name, shape):
    made = whole_numbers(got, name)
    if made.shape != shape:
        raise Wrong(f"{name} returned numbers of shape {made.shape}; here the shape must be {shape}")
    return made


def _first(counts, got):
    got = _array(got, "first_slots", counts.shape)
    right = np.cumsum(counts, axis=0) - counts
    if (got == right).all():
        return
    shown = f"first_slots({counts.tolist()}) gave {got.tolist()}" if counts.size < 10 else "first_slots"
    if (got == np.cumsum(counts, axis=0)).all():
        raise Wrong(
            f"{shown}: this counts the block's own pairs too. Its first slot comes after the slots of the blocks "
            "BEFORE it: block 0 begins at 0."
        )
    if (got == np.cumsum(counts, axis=1) - counts).all() or (got == np.cumsum(counts, axis=1)).all():
        raise Wrong(
            f"{shown}: the sums run over experts; each expert has a counter of its own, and the sums run over "
            "the blocks."
        )
    flat = np.cumsum(counts).reshape(counts.shape)
    if (got == flat - counts).all() or (got == flat).all():
        raise Wrong(f"{shown}: one sum runs over everything; each expert's slots begin at 0.")
    if (got == 0).all():
        raise Wrong(f"{shown}: every block begins at 0, so two blocks would write to one slot.")
    b, e = np.argwhere(got != right)[0].tolist()
    if (got[b, e] - int(right[b, e])) % (1 << 32) == 0:
        raise Wrong(
            f"{shown}: the first slot of block {b} for expert {e} must be {right[b, e]}; the sum has wrapped, "
            "since 32 bits do not hold it."
        )
    raise Wrong(
        f"{shown}: the first slot of block {b} for expert {e} must be {right[b, e]}, the number of pairs that "
        f"the blocks before it have for expert {e}."
    )


def _right_own(experts, first):
    left, out = list(first), []
    for e in experts:
        out.append(-1 if e < 0 else left[e])
        if e >= 0:
            left[e] += 1
    return np.array(out, object)


def _own(experts, first, got):
    got = _array(got, "own_slots", (len(experts),))
    right = _right_own(experts, first)
    if (got == right).all():
        return
    shown = f"own_slots({experts}, first={first}) gave {got.tolist()}"
    i = int(np.argmax(got != right))
    e = experts[i]
    if e < 0:
        raise Wrong(
            f"{shown}: pair {i} has expert -1, an empty slot of the token; its answer is -1, and nothing is counted."
        )
    if all(got[j] == right[j] + 1 for j, other in enumerate(experts) if other >= 0):
        raise Wrong(f"{shown}: all are one too high; the first pair of an expert gets `first` itself.")
    if got[i] == right[i] - first[e]:
        raise Wrong(f"{shown}: the block's first slot is missing; pair {i} must get {int(right[i])}.")
    if got[i] == first[e]:
        raise Wrong(
            f"{shown}: pair {i} is not the first one for expert {e} in this block, and gets the same slot as another."
        )
    if got[i] == first[e] + i:
        raise Wrong(f"{shown}: pair {i} counts all pairs before it; count only those for expert {e}.")
    raise Wrong(f"{shown}: pair {i} (expert {e}) must get slot {int(right[i])}.")


def _together(answer, pairs, blocks):
    counts = np.array([[int((b == e).sum()) for e in range(N_EXPERTS)] for b in blocks])
    first = _array(call(answer, "first_slots", counts), "first_slots", counts.shape).astype(np.int64)
    slots = [
        s
        for b, f in zip(blocks, first)
        for s in _array(call(answer, "own_slots", b.tolist(), f), "own_slots", (len(b),)).tolist()
    ]
    right = _right_own(pairs, [0] * N_EXPERTS).tolist()
    if slots != right:
        i = next(i for i, (a, b) in enumerate(zip(slots, right)) if a != b)
        raise Wrong(
            f"with {len(blocks)} blocks, pair {i} of {len(pairs)} (expert {pairs[i]}) got slot {slots[i]} and "
            f"must get {right[i]}."
        )
