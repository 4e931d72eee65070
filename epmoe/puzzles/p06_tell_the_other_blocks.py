"""Puzzle 6: one block has waited; ready flags tell the others."""

import re

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 6: tell the other blocks.

Polling takes bandwidth, so only block 0 polls the signals of the peers; then
it writes `offsets`, all its threads together. The other blocks must not read
`offsets` before. For each block there is a flag in `ready`, 0 at first.

Two holes:
  tell   all threads of block 0, behind their stores to `offsets`: set the flag
         of each block to 1. There may be more blocks than threads.
  hear   all threads of every block (of block 0 too): go on when its own flag
         is set, and see all of `offsets`. Reset the flag to 0.

In NumPy:
    tell:  ready[:grid] = 1         after offsets[:] = ...
    hear:  wait for ready[block]; ready[block] = 0

Intrinsics:
    st_ORDER_SCOPE_i32(address, value)      relaxed or release
    ld_ORDER_SCOPE_i32(address)             relaxed or acquire
    store_i32(address, value)
    syncthreads()
"""

from epmoe.device import *
from epmoe.puzzles.given import region

OFFSETS, READY, SEEN = 0, 1, 2      # int32 [OFFSETS_LENGTH], [8], [8, OFFSETS_LENGTH]
OFFSETS_LENGTH = 70


@kernel
def work(params, num_tokens, my_rank):
    offsets, ready = region(params, OFFSETS, my_rank), region(params, READY, my_rank)
    if block_idx() == 0:
        i = thread_idx()
        while i < OFFSETS_LENGTH:
            store_i32(offsets + u64(4 * i), num_tokens + 10 * i)
            i += block_dim()
        tell(ready)
    hear(ready)
    seen = region(params, SEEN, my_rank) + u64(4 * OFFSETS_LENGTH * block_idx())
    i = thread_idx()
    while i < OFFSETS_LENGTH:
        store_i32(seen + u64(4 * i), load_i32(offsets + u64(4 * i)))
        i += block_dim()


@device_fn
def tell(ready):
    # ---- your 5 lines ----
    pass
    # ----------------------


@device_fn
def hear(ready):
    # ---- your 5 lines ----
    pass
    # ----------------------
'''

LENGTH, BLOCKS = 70, 8
REGIONS = (
    Region("offsets", (LENGTH,), axes=("place",)),
    Region("ready", (BLOCKS,), axes=("block",)),
    Region("seen", (BLOCKS, LENGTH), axes=("block", "place")),
)


def _world(n, grid, threads):
    offsets = n + 10 * np.arange(LENGTH)
    seen = REGIONS[2].unwritten()
    seen[:grid] = offsets
    start = {"ready": np.zeros(BLOCKS)}
    expected = {"offsets": offsets, "ready": np.zeros(BLOCKS), "seen": seen}
    name = f"{many(grid, 'block')} of {many(threads, 'thread')}"
    return World(name, REGIONS, (n,), (start,), (expected,), grid, threads)


def worlds():
    """Two blocks of two warps; more blocks than threads; one block alone."""
    return _world(3, 2, 64), _world(5, 8, 4), _world(4, 1, 33), _world(2, 5, 40)


def _sign(f):
    if not f.differs("ready") or "while" not in f.hole(1):
        return None
    if re.search(r"\bst\w+\(.*\b0\)", f.hole(1)):
        return (
            "a flag is raised again after its block has reset it: the threads of block 0 share the flags, and one "
            "thread raises each."
        )
    return "the flags stay raised: the next launch would go on at once. Reset each to 0."


def _cause(f):
    if f.waits_for("ready") and f.says(r"threads 1-[^:]*:\d+[^:]*:\d+: spins on"):
        return (
            "all threads poll the flag, and the first one resets it before the others have seen it: one thread polls "
            "for the block."
        )
    if f.waits_for("ready") and not f.holds("ready", 0)[: f.world.grid].any() and not (f.holds("seen", 0) >= 0).any():
        return "no flag is ever raised."
    if f.waits_for("ready") and "block_idx" not in f.hole(1):
        return "all blocks wait for one flag: each hears its own, ready + u64(4 * block_idx())."
    if f.waits_for("ready"):
        return (
            "the flags of some blocks are never raised, or are reset before they are seen: there is one for each of "
            "grid_dim() blocks, block 0 included, and there may be more blocks than threads."
        )
    if f.kind == "hang":
        return "not all threads of a block come to the same syncthreads()."
    if f.kind == "bounds":
        return "an address is outside `ready`: it has a flag of 4 bytes for each of grid_dim() blocks."
    if f.race_on("ready") and f.says("scopes"):
        return "the flag goes from block to block: cta is too narrow a scope."
    if f.race_on("ready") and f.says("plain"):
        return "the flag is polled while another block writes it: both need a strong word, st_ and ld_."
    if f.race_on("offsets") and f.says("the write is relaxed"):
        return "the flag is raised by a relaxed store, which orders nothing: release it."
    if f.race_on("offsets") and f.says("the read is relaxed"):
        return "the flag is seen by a relaxed load, which orders nothing: acquire it."
    if f.race_on("offsets") and (
        f.says("missing on the second's side") or "while" in f.hole(1) and "syncthreads" not in f.hole(1)
    ):
        return (
            "thread 0 has waited, and the other threads of its block go on without it: a syncthreads() is missing "
            "behind the wait, in hear."
        )
    if f.race_on("offsets") and f.says("a sync\\w+ (or syncthreads )?is missing before its release"):
        return (
            "a flag is raised before all threads of block 0 have stored their part of `offsets`: a syncthreads() is "
            "missing before the flags, in tell."
        )
    if f.race_on("offsets") and f.says("both are in one (block|warp)"):
        return "block 0 reads offsets that its other threads write: it must hear its flag too, and syncthreads()."
    if f.race_on("offsets") or f.differs("seen"):
        return "a block does not wait for its flag."
    return None


PUZZLE = Puzzle(
    title="Tell the other blocks",
    line="one block waits for all, and flags let the others go",
    start=START,
    hints=(
        "tell: the threads of block 0 have each stored a part of `offsets`. A thread that raises a "
        "flag must know of all parts. hear: one thread polls; the others must know what it knows.",
        "Both times that is a syncthreads(): in tell before the flags, in hear behind the wait.",
        "The flag is released in tell and acquired in hear. Both blocks are on one GPU: gpu.",
        "tell: syncthreads(), then block = thread_idx() and a loop in steps of block_dim(). hear: "
        "`if thread_idx() == 0:` poll ready + u64(4 * block_idx()), then store 0 there.",
    ),
    worlds=worlds,
    kernels=("work",),
    sign=_sign,
    cause=_cause,
)
