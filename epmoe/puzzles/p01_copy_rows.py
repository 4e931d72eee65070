"""Puzzle 1: threads and blocks share rows, 16 bytes at a time."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 1: copy rows.

A launch has grid_dim() blocks of block_dim() threads. Together they copy the
first num_tokens rows of `rows` to the same places of `copied`. A row has
VECTORS vectors of 16 bytes and lies directly behind the row before it.

    block b copies the rows b, b + grid_dim(), b + 2 * grid_dim(), ...
    thread i of it copies the vectors i, i + block_dim(), ... of each row

In NumPy:
    copied[:num_tokens] = rows[:num_tokens]

Intrinsics:
    block_idx(), thread_idx()           this block's number, and this thread's
                                        in it
    a, b, c, d = load16(address)        four uint32, 16 bytes
    store16(address, a, b, c, d)
Here and in all puzzles the name of a region, such as rows, is the address of
its first byte. Addresses are uint64 and count bytes. Adding u64(n) keeps them
uint64 on a GPU; a plain n works too.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

ROWS, COPIED = 0, 1     # memory regions: uint32 [12, 4 * VECTORS]
VECTORS = 3             # of a row


@kernel
def copy_rows(params, num_tokens, my_rank):
    rows = region(params, ROWS, my_rank)
    copied = region(params, COPIED, my_rank)
    # ---- your 8 lines ----

    # ----------------------
'''

ROOM, VECTORS = 12, 3
WIDTH = 4 * VECTORS


def _rows():
    return (100 * np.arange(ROOM)[:, None] + np.arange(WIDTH) + 1).astype(np.uint32)


def _world(n, grid, block):
    name = f"{many(n, 'row')}, {many(grid, 'block')} of {many(block, 'thread')}"
    regions = tuple(Region(r, (ROOM, WIDTH), np.uint32, ("row", "word")) for r in ("rows", "copied"))
    rows, copied = _rows(), regions[1].unwritten()
    copied[:n] = rows[:n]
    start = ({"rows": rows},)
    return World(name, regions, (n,), start, ({"copied": copied, "rows": rows},), grid, block)


def worlds():
    """Fewer blocks than rows and threads than vectors, and more."""
    return _world(5, 2, 2), _world(1, 1, 3), _world(2, 3, 4), _world(0, 1, 1), _world(12, 3, 8)


def _copied(world, chosen):
    """What the memory holds if only chosen[row, vector] were copied."""
    copied = world.region("copied").unwritten()
    words = np.repeat(chosen, 4, axis=1)
    copied[words] = _rows()[words]
    return ({"copied": copied},)


def _mask(world, rows=None, vectors=None):
    n = world.tokens[0]
    row, vector = np.arange(ROOM)[:, None], np.arange(VECTORS)
    return (row < (n if rows is None else rows(n, world))) & (vector < (VECTORS if vectors is None else vectors(world)))


def _every_row_one_vector(world):
    chosen = np.zeros(ROOM * VECTORS, bool)
    chosen[: max(0, world.tokens[0] - 1 + VECTORS) if world.tokens[0] else 0] = True
    return chosen.reshape(ROOM, VECTORS)


def _one_vector_more(world):
    n, chosen = world.tokens[0], _mask(world)
    chosen[n : n + 1, 0] = n > 0
    return chosen


PUZZLE = Puzzle(
    title="Copy rows",
    line="blocks share rows, threads share the vectors of a row",
    start=START,
    hints=(
        "Two loops, one inside the other: over rows, from block_idx() in steps of grid_dim(); over "
        "vectors, from thread_idx() in steps of block_dim().",
        "Vector i of a row begins 16 * (row * VECTORS + i) bytes behind the first row.",
        "row = block_idx()\nwhile row < num_tokens:\n    i = thread_idx()\n    while i < VECTORS:\n"
        "        at = u64(16 * (row * VECTORS + i))\n        ...",
    ),
    worlds=worlds,
    kernels=("copy_rows",),
    mistakes=(
        (lambda w: _copied(w, _mask(w, lambda n, w: 0)), "no row has been copied yet."),
        (
            lambda w: _copied(w, _mask(w, lambda n, w: min(n, w.grid))),
            "each block copies one row only: it must go on with the row grid_dim() further.",
        ),
        (
            lambda w: _copied(w, _mask(w, None, lambda w: min(VECTORS, w.block))),
            "each thread copies one vector of a row only: it must go on with the vector block_dim() further.",
        ),
        (
            lambda w: _copied(w, _mask(w, lambda n, w: min(n, w.grid), lambda w: min(VECTORS, w.block))),
            "each thread copies one vector in all: two loops are needed, over rows and over vectors.",
        ),
        (
            lambda w: _copied(w, _mask(w, lambda n, w: ROOM)),
            "rows from num_tokens on are copied too: they belong to nobody.",
        ),
        (lambda w: _copied(w, _mask(w, lambda n, w: n + 1)), "one row too many is copied: the last is num_tokens - 1."),
        (
            lambda w: _copied(w, _one_vector_more(w)),
            "one vector too many of each row is copied: vector VECTORS is the first of the next row.",
        ),
        (
            lambda w: _copied(w, _every_row_one_vector(w)),
            "the rows overlap: row r begins VECTORS vectors behind row r - 1, not one.",
        ),
        (
            lambda w: _copied(w, _mask(w, lambda n, w: n + 1) & (np.arange(ROOM)[:, None] > 0)),
            "the rows are one too far: block 0 begins with row 0.",
        ),
    ),
    causes=(
        (
            lambda f: f.says("is not 16-byte aligned"),
            "an address is not a multiple of 16: a vector takes 16 bytes, so its number must be multiplied by 16.",
        ),
        (
            lambda f: f.race_on("copied") and f.says("both are in one block|both are in one warp"),
            "threads of one block copy the same vector: start at thread_idx(), go on by block_dim().",
        ),
        (lambda f: f.race_on("copied"), "several blocks copy the same row: start at block_idx(), go on by grid_dim()."),
        (
            lambda f: f.kind == "bounds",
            "an address is outside the rows: row r begins 16 * VECTORS * r bytes behind the first.",
        ),
        (
            lambda f: (
                f.differs("copied")
                and sorted(f.holds("copied")[f.place[2][0]]) == sorted(f.should("copied")[f.place[2][0]])
            ),
            "the words of a vector are in the wrong places: store a, b, c, d in the order of the load.",
        ),
        (
            lambda f: f.differs("copied") and f.holds("copied")[f.place[2]] in _rows(),
            "a row is at the wrong place: row r begins 16 * VECTORS * r bytes behind the first.",
        ),
    ),
)
