"""Puzzle 7: prefix sums over all threads of a block."""

import numpy as np

from epmoe.puzzles.judging import Puzzle, accesses
from epmoe.puzzles.world import Region, World

START = '''"""Puzzle 7: a prefix sum over the block.

Thread i has `count`, the number of rows of expert i. Its rows begin where the
rows of all experts before it end. Compute `start`, the sum of the counts of
all threads BEFORE thread i, also of other warps.

In NumPy:
    start = np.cumsum(counts) - counts

Intrinsics:
    warp_inclusive_sum_i32(n)       sum over the lanes up to this one, of the
                                    warp; all 32 lanes must reach it
    sums = shared_array(32, int32)  memory of the block: sums[i] reads, and
                                    sums[i] = n writes
    lane_id(), warp_id()            0 to 31; 0, 1, 2, ... in the block
    syncthreads()
Two threads that use the same place of shared memory need a barrier between
them, as in global memory.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

COUNTS, STARTS = 0, 1       # int32 [128], int32 [128]


@kernel
def number_rows(params, num_tokens, my_rank):
    counts, starts = region(params, COUNTS, my_rank), region(params, STARTS, my_rank)
    i = thread_idx()
    count = load_i32(counts + u64(4 * i))
    start = 0
    # ---- your 8 lines ----

    # ----------------------
    store_i32(starts + u64(4 * i), start)
'''

ROOM = 128
REGIONS = (Region("counts", (ROOM,), axes=("expert",)), Region("starts", (ROOM,), axes=("expert",)))


def _world(name, counts):
    n = len(counts)
    start, expected = (
        {"counts": REGIONS[0].unwritten(counts)},
        {"starts": REGIONS[1].unwritten(np.cumsum(counts) - counts)},
    )
    return World(f"{n} threads, {name}", REGIONS, (n,), (start,), (expected,), 1, n, data=dict(counts=counts))


def worlds():
    """Four warps first, since one alone hides most mistakes."""
    return (
        _world("small counts", (np.arange(128) * 7) % 5 + 1),
        _world("every count 1", np.ones(32, int)),
        _world("most counts 0", (np.arange(96) % 31 == 3) * 9),
        _world("large counts", (np.arange(128) * 37) % 1000 + 1),
    )


def _model(starts_of):
    return lambda w: ({"starts": REGIONS[1].unwritten(starts_of(w.data["counts"]))},)


def _in_warps(c):
    return c.reshape(-1, 32).cumsum(axis=1)


def _before(c, first=0):
    """For each thread the sum of the warps before its own, from warp `first` on."""
    of_warps = c.reshape(-1, 32).sum(axis=1)
    of_warps[:first] = 0
    return np.repeat(of_warps.cumsum() - of_warps, 32)


def _cause(f):
    if f.kind == "race" and f.says(r"the write at \S+ is not ordered after the write"):
        return "several lanes write to the same place of shared memory: only the last lane knows the warp's sum."
    if f.kind == "race" and f.uses(r"(?m)^ {5,}syncthreads|if .*syncthreads"):
        return "not all threads meet: syncthreads() stands behind the `if`, not in it."
    if f.kind == "race":
        return "a warp reads sums that other warps have not left yet: a syncthreads() is missing."
    if f.kind == "hang":
        return "not all threads come to a warp operation or a barrier: take it out of the `if`."
    if f.kind == "bounds":
        return "an index is outside of the shared array."
    return None


def _loads(puzzle, answer, tell):
    """Praise, or a remark if threads load more than their own count."""
    n = len(accesses(puzzle, answer, "counts"))
    remark = ". Sums in warps and in shared memory need one for each" if n > ROOM else ""
    return f"{ROOM} threads load {n} counts{remark}."


PUZZLE = Puzzle(
    title="Prefix sum",
    line="number rows across warps, by way of shared memory",
    start=START,
    hints=(
        "Inside a warp: warp_inclusive_sum_i32(count) - count. What is missing is the sum of all warps "
        "before this one.",
        "The last lane of each warp knows the sum of its warp, and leaves it in sums[warp_id()].",
        "Then syncthreads(), and each thread adds up sums[0] to sums[warp_id() - 1].",
    ),
    worlds=worlds,
    kernels=("number_rows",),
    mistakes=(
        (_model(lambda c: 0 * c), "`start` is 0 for every thread."),
        (
            _model(np.cumsum),
            "the thread's own count is in the sum: the sum over the threads BEFORE this one is asked for.",
        ),
        (
            _model(lambda c: _in_warps(c).ravel() - c),
            "each warp begins at 0 again: the sums of the warps before it are missing.",
        ),
        (
            _model(lambda c: _in_warps(c).ravel()),
            "each warp begins at 0 again, and the thread's own count is in the sum.",
        ),
        (
            _model(lambda c: _in_warps(c).ravel() - c + _before(c) + np.repeat(c.reshape(-1, 32).sum(axis=1), 32)),
            "the sum of the thread's own warp is added too: only warps before it count.",
        ),
        (
            _model(lambda c: _in_warps(c).ravel() - c + c.sum()),
            "the sums of all warps are added: only warps before the thread's own count.",
        ),
        (
            _model(lambda c: _in_warps(c).ravel() - c + np.repeat(np.r_[0, c.reshape(-1, 32).sum(axis=1)[:-1]], 32)),
            "only the warp just before is added: all warps before the thread's own count.",
        ),
        (_model(lambda c: _in_warps(c).ravel() - c + _before(c, 1)), "the sum of warp 0 is missing."),
        (
            _model(lambda c: _in_warps(c).ravel() - c + np.repeat(np.cumsum(c[::32]) - c[::32], 32)),
            "what the first lane of a warp leaves in shared memory is its own count: the sum of the warp is "
            "in the last lane.",
        ),
    ),
    cause=_cause,
    more=_loads,
)
