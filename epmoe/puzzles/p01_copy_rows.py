"""Puzzle 1: threads and blocks share rows, 16 bytes at a time."""

import numpy as np

from epmoe.puzzles.judging import Puzzle, shared
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
    rows = _rows()
    copied = regions[1].unwritten(rows[:n])
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
    return ({"copied": copied, "rows": _rows()},)


def _model(rows=lambda w: w.tokens[0], vectors=lambda w: VECTORS):
    """A model: the first rows(world) rows are copied, and of each the first vectors(world) vectors."""
    row, vector = np.arange(ROOM)[:, None], np.arange(VECTORS)
    return lambda w: _copied(w, (row < rows(w)) & (vector < vectors(w)))


def _one_a_block(w):
    return min(w.tokens[0], w.grid)


def _one_a_thread(w):
    return min(VECTORS, w.block)


def _overlapping(w):
    n = w.tokens[0]
    return _copied(w, np.arange(ROOM * VECTORS).reshape(ROOM, VECTORS) < (n - 1 + VECTORS if n else 0))


def _one_vector_more(w):
    n, row, vector = w.tokens[0], np.arange(ROOM)[:, None], np.arange(VECTORS)
    return _copied(w, (row < n) | (row == n) & (vector == 0) & (n > 0))


def _one_too_far(w):
    row = np.arange(ROOM)[:, None]
    return _copied(w, np.repeat((0 < row) & (row <= w.tokens[0]), VECTORS, axis=1))


def _cause(f):
    if f.differs("rows"):
        return "`rows` is overwritten: load from rows, store into copied."
    if f.race_on("copied") and f.says("both are in one block|both are in one warp"):
        return "threads of one block copy the same vector: start at thread_idx(), go on by block_dim()."
    if f.race_on("copied"):
        return "several blocks copy the same row: start at block_idx(), go on by grid_dim()."
    if f.kind == "bounds":
        return "an address is outside the rows: row r begins 16 * VECTORS * r bytes behind the first."
    if f.differs("copied") and sorted(f.holds("copied")[f.place[2][0]]) == sorted(f.should("copied")[f.place[2][0]]):
        return "the words of a vector are in the wrong places: store a, b, c, d in the order of the load."
    for n in range(1, ROOM * WIDTH) if f.differs("copied") else ():
        if (f.holds("copied").ravel()[n:] == f.should("copied").ravel()[:-n]).all():
            return f"everything lies {4 * n} bytes too far: row 0 begins at the first byte of `copied`."
    if f.differs("copied") and f.holds("copied")[f.place[2]] in _rows():
        return "a row is at the wrong place: row r begins 16 * VECTORS * r bytes behind the first."
    return None


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
        (_model(lambda w: 0), "no row has been copied yet."),
        (_model(_one_a_block), "each block copies one row only: it must go on with the row grid_dim() further."),
        (
            _model(vectors=_one_a_thread),
            "each thread copies one vector of a row only: it must go on with the vector block_dim() further.",
        ),
        (
            _model(_one_a_block, _one_a_thread),
            "each thread copies one vector in all: two loops are needed, over rows and over vectors.",
        ),
        (_model(lambda w: ROOM), "rows from num_tokens on are copied too: they belong to nobody."),
        (_model(lambda w: w.tokens[0] + 1), "one row too many is copied: the last is num_tokens - 1."),
        (_one_vector_more, "one vector too many of each row is copied: vector VECTORS is the first of the next row."),
        (_overlapping, "the rows overlap: row r begins VECTORS vectors behind row r - 1, not one."),
        (_one_too_far, "the rows are one too far: block 0 begins with row 0."),
    ),
    cause=_cause,
    more=shared("copied"),
)
