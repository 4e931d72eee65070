"""Puzzle 11: the last block resets the counters."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 11: clean up for the next round.

In each launch the blocks claim rows with `claimed`, a counter for each of
EXPERTS experts, as in puzzle 2. The next launch needs these counters at 0
again. Who may reset them? A block that has ended its own work does not know
whether others still claim. So every block that ends counts itself in `done`,
and the LAST one resets `claimed` and `done`. No block waits for another.

In NumPy, at the end of a launch:
    claimed[:] = 0
    done = 0

Intrinsics:
    atomic_add_ORDER_SCOPE_i32(address, n)  returns what was there before; ORDER
                                            is relaxed, acquire, release or
                                            acq_rel (both)
    store_i32(address, 0)
    syncthreads(), grid_dim()
Several launches follow one another in the tests, all on the same counters.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

CLAIMED, DONE, ROWS = 0, 1, 2       # int32 [EXPERTS], [1], [EXPERTS, ROOM] of this launch
EXPERTS, ROOM = 3, 16


@kernel
def claim_rows(params, num_tokens, my_rank):
    claimed, done = region(params, CLAIMED, my_rank), region(params, DONE, my_rank)
    rows = region(params, ROWS, my_rank)
    for expert in range(EXPERTS):
        row = atomic_add_relaxed_gpu_i32(claimed + u64(4 * expert), 1)
        while row < num_tokens:
            store_i32(rows + u64(4 * (expert * ROOM + row)), 100 * (expert + 1) + row)
            row = atomic_add_relaxed_gpu_i32(claimed + u64(4 * expert), 1)
    # ---- your 6 lines ----

    # ----------------------
'''

EXPERTS, ROOM, ROUNDS = 3, 16, 3
REGIONS = (
    Region("claimed", (EXPERTS,), axes=("expert",)),
    Region("done", (1,), axes=("word",)),
    Region("rows", (ROUNDS, EXPERTS, ROOM), axes=("round", "expert", "row"), by_round=True),
)


def _world(n, grid, threads, at_once=None):
    rows = REGIONS[2].unwritten()
    rows[:, :, :n] = 100 * (np.arange(EXPERTS)[:, None] + 1) + np.arange(n)
    nothing = {"claimed": np.zeros(EXPERTS), "done": np.zeros(1)}
    expected = nothing | {"rows": rows}
    name = f"{ROUNDS} launches of {many(grid, 'block')} of {many(threads, 'thread')}, {n} rows an expert"
    if at_once:
        name += f", {many(at_once, 'block')} at a time"
    return World(name, REGIONS, (n,), (nothing,), (expected,), grid, threads, rounds=ROUNDS, blocks=at_once)


def worlds():
    """Several blocks of a thread; of several warps; a single block; blocks that start when others have ended."""
    return _world(5, 4, 1), _world(12, 2, 33), _world(9, 1, 8), _world(0, 6, 2, at_once=1)


def _sign(f):
    if f.differs("claimed", "rows") and not f.holds("done", 0).any() and _no_reset(f):
        return "the counters are not reset: the second launch finds all rows claimed."
    if f.holds("done", 0)[0] == ROUNDS * f.world.grid:
        return "`done` is not reset to 0, so the next launch counts on from there."
    if f.uses(r"== grid_dim\(\)(?! *- *1)"):
        return "the atomic returns how many blocks came BEFORE: the last one finds grid_dim() - 1."
    if f.differs("claimed") and (f.holds("claimed", 0) == 0).any() and (f.holds("claimed", 0) != 0).any():
        return "only some counters are reset: there is one for each expert."
    return None


def _cause(f):
    if f.waits_for("done", "claimed"):
        return (
            "a block waits for others, and some may start only when it has ended: no block waits, the last one resets."
        )
    if f.race_on("claimed") and not f.uses("fence") and f.uses(r"atomic_add_relaxed_gpu_i32\(done|red_add_relaxed"):
        return (
            "`done` is counted by a relaxed atomic: the last block knows that the others came, but their work is not "
            "ordered before its resets. Take acq_rel."
        )
    if f.race_on("claimed") and f.uses("atomic_add_acquire"):
        return "`done` is counted with acquire alone: the other blocks release nothing. Take acq_rel."
    if f.race_on("claimed") and f.uses("atomic_add_release"):
        return "`done` is counted with release alone: the last block acquires nothing. Take acq_rel."
    if f.race_on("done") and f.says("scopes") or f.race_on("claimed") and f.uses("_cta_"):
        return "the blocks count themselves in a scope that holds one block: cta is too narrow."
    if f.race_on("done"):
        return "`done` is reset while other blocks still count themselves in: the last one alone resets it."
    if f.race_on("claimed") and not f.uses("thread_idx|lane_id|elect_one"):
        return "every thread counts itself in `done`: one thread counts its block."
    if f.race_on("claimed") and not f.uses("syncthreads"):
        return (
            "a block counts itself when some of its threads still claim: a syncthreads() is missing before the count."
        )
    if f.race_on("claimed") or f.differs("claimed", "rows"):
        return (
            "the counters are reset while other blocks still claim: only the last block, which finds grid_dim() - 1 in"
            " `done`, may do it."
        )
    if f.differs("done"):
        return "each block counts itself once, by one thread; the last one resets `done`."
    return None


PUZZLE = Puzzle(
    title="Clean up",
    line="the last block to leave resets the counters",
    start=START,
    hints=(
        "First all threads of the block must have ended their work; then one thread counts the block.",
        "The atomic returns how many blocks came before. The last one finds grid_dim() - 1.",
        "What the last block resets, others have used: its atomic must acquire what theirs release. "
        "Every block may be the last, so: acq_rel.",
    ),
    worlds=worlds,
    kernels=("claim_rows",),
    sign=_sign,
    cause=_cause,
)


def _no_reset(f):
    """Whether all claims of all launches are still in the counters."""
    claims = f.world.tokens[0] + ROUNDS * f.world.grid * f.world.block
    return (f.holds("claimed", 0) == claims).all()
