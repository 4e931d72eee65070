"""Puzzle 8: messages become rows, grouped by expert."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 8: group by expert.

Messages lie in recv_buf[local_expert, src_rank, slot], with gaps: only the
first counts[local_expert, src_rank] slots of a segment are filled. Experts
want rows without gaps: first all rows of local expert 0, in the order of
src_rank, then the rows of local expert 1, and so on.

A block takes a segment. Find the row at which it begins, copy its messages,
thread by thread, and let the first segment of each expert write
row_offsets[local_expert], the row at which the expert begins. (The last one,
the number of all rows, is written by lines that are given.)

In NumPy:
    rows = np.concatenate([recv_buf[e, s, :counts[e, s]]
                           for e in ... for s in ...])
    row_offsets[e] = counts[:e].sum()

Intrinsics:
    load_i32(address), store_i32(address, value)
Everything is int32. A place in an array of axes (A, B, C) is
(a * B + b) * C + c.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [LOCAL, N_RANKS], [LOCAL, N_RANKS, SLOTS], [LOCAL * N_RANKS * SLOTS], [LOCAL + 1]
COUNTS, RECV_BUF, ROWS, ROW_OFFSETS = 0, 1, 2, 3
LOCAL, N_RANKS, SLOTS = 3, 4, 6


@kernel
def group(params, num_tokens, my_rank):
    counts, recv_buf = region(params, COUNTS, my_rank), region(params, RECV_BUF, my_rank)
    rows, row_offsets = region(params, ROWS, my_rank), region(params, ROW_OFFSETS, my_rank)
    segment = block_idx()
    while segment < LOCAL * N_RANKS:
        local_expert, src_rank = segment // N_RANKS, segment % N_RANKS
        count = load_i32(counts + u64(4 * segment))
        # ---- your 9 lines ----
        pass
        # ----------------------
        segment += grid_dim()
    if block_idx() == 0 and thread_idx() == 0:
        total = 0
        for i in range(LOCAL * N_RANKS):
            total += load_i32(counts + u64(4 * i))
        store_i32(row_offsets + u64(4 * LOCAL), total)
'''

LOCAL, RANKS, SLOTS = 3, 4, 6
AXES = ("local_expert", "src_rank", "slot")
REGIONS = (
    Region("counts", (LOCAL, RANKS), axes=AXES),
    Region("recv_buf", (LOCAL, RANKS, SLOTS), axes=AXES),
    Region("rows", (LOCAL * RANKS * SLOTS,), axes=("row",)),
    Region("row_offsets", (LOCAL + 1,), axes=("local_expert",)),
)


def _buf():
    """Message (local expert e, src_rank s, slot i) is the number 100 (e + 1) + 10 s + i, filled or not."""
    e, s, i = np.indices((LOCAL, RANKS, SLOTS))
    return 100 * (e + 1) + 10 * s + i


def _world(name, counts, grid, threads):
    counts = np.array(counts)
    start = {"counts": counts, "recv_buf": _buf()}
    expected = {"row_offsets": np.r_[0, counts.sum(axis=1).cumsum()], "rows": _rows(counts, _begins(counts))}
    name = f"{name}, {many(grid, 'block')} of {many(threads, 'thread')}"
    return World(name, REGIONS, (0,), (start,), (expected,), grid, threads, data=dict(counts=counts))


def _begins(counts):
    """The row at which each segment begins."""
    return np.cumsum(counts.ravel()) - counts.ravel()


def _rows(counts, begins, buf=_buf()):
    made, buf = REGIONS[2].unwritten(), buf.reshape(-1, SLOTS)
    for segment, n in enumerate(counts.ravel()):
        for slot in range(n):
            if begins[segment] + slot < len(made):
                made[begins[segment] + slot] = buf[segment, slot]
    return made


def worlds():
    """Different counts; segments and experts without a message; all slots filled."""
    return (
        _world("all counts different", [[1, 2, 3, 4], [2, 5, 1, 3], [4, 1, 2, 5]], 12, 8),
        _world("gaps", [[0, 2, 0, 6], [0, 0, 0, 0], [1, 0, 4, 0]], 5, 4),
        _world("full", [[6] * RANKS] * LOCAL, 3, 2),
        _world("nothing", [[0] * RANKS] * LOCAL, 2, 32),
    )


def _model(begins_of, buf=_buf()):
    return lambda w: ({"rows": _rows(w.data["counts"], begins_of(w.data["counts"]), buf)},)


def _offsets(change):
    """A model: the rows are right, and row_offsets are changed."""
    return lambda w: [e | {"row_offsets": change(e["row_offsets"])} for e in w.expected]


def _inside(c):
    """For each segment the messages of ranks before it, of the same expert."""
    return (c.cumsum(axis=1) - c).ravel()


def _by_rank(c):
    """Where segments begin if all experts of rank 0 come first."""
    return _begins(c.T).reshape(RANKS, LOCAL).T.ravel()


WRONG_SLOTS = "rows come from the wrong slots: slot i of the segment is recv_buf[segment * SLOTS + i], row + i its row."


def _sign(f):
    if f.differs("rows") and (not f.uses("while|for .*block_dim|if .*count") or _no_further_than_threads(f)):
        return "only one message a thread is copied: a thread goes on by block_dim()."
    return None


def _cause(f):
    if f.race_on("rows") and f.says("both are in one (block|warp)"):
        return "several threads write the same row: slot begins at thread_idx() and grows by block_dim()."
    if f.race_on("row_offsets"):
        return "several threads or blocks write the same row offset: one thread of the segment with src_rank 0 does."
    if (f.race_on("rows") or f.differs("rows")) and not f.uses("SLOTS"):
        return WRONG_SLOTS
    if (f.race_on("rows") or f.differs("rows")) and _unfilled(f):
        return "slots beyond the count are copied: a segment holds `count` messages, not SLOTS."
    if f.race_on("rows"):
        return "segments overlap: each begins where all segments before it end, also segments of the same expert."
    if f.kind == "bounds":
        return "an address is outside the arrays: row_offsets has a word for each local expert, and one more."
    if f.differs("row_offsets"):
        return "row_offsets[e] must be the number of rows of all experts before e."
    if f.differs("rows"):
        return WRONG_SLOTS
    return None


PUZZLE = Puzzle(
    title="Group by expert",
    line="from slots with gaps to rows without",
    start=START,
    hints=(
        "A segment begins where all segments before it end: row is the sum of their counts, and "
        "segments are numbered in the order of the rows.",
        "row = 0, then a loop over range(segment) that adds the counts. If src_rank is 0, this is also "
        "the expert's row offset: one thread stores it.",
        "Then slot = thread_idx(), and while slot < count: copy recv_buf[segment * SLOTS + slot] to "
        "rows[row + slot], go on by block_dim().",
    ),
    worlds=worlds,
    kernels=("group",),
    mistakes=(
        (lambda w: ({"rows": REGIONS[2].unwritten()},), "no row is written."),
        (
            _model(lambda c: np.arange(LOCAL * RANKS) * SLOTS),
            "the rows have the gaps of recv_buf: segments must follow one another at their counts, not at SLOTS.",
        ),
        (
            _model(_begins, _buf().ravel()[np.add.outer(np.arange(LOCAL * RANKS), np.arange(SLOTS))]),
            "rows come from the wrong slots: slot i of a segment is recv_buf[segment * SLOTS + i].",
        ),
        (_model(_inside), "each expert begins at row 0: the rows of the experts before it are missing."),
        (
            _model(lambda c: np.repeat(_begins(c.sum(axis=1)), RANKS)),
            "each rank begins at the first row of the expert: the rows of the ranks before it are missing.",
        ),
        (
            _model(lambda c: c.ravel().cumsum()),
            "the segment's own count is in the sum: a segment begins where those BEFORE it end.",
        ),
        (_model(_by_rank), "the rows are in the order of src_rank first: all rows of an expert belong together."),
        (
            _offsets(lambda offsets: np.r_[REGIONS[3].unwritten()[:-1], offsets[-1]]),
            "row_offsets are not written: the segment of src_rank 0 knows where its expert begins.",
        ),
        (
            _offsets(lambda offsets: np.r_[offsets[1:], offsets[-1]]),
            "row_offsets[e] is where expert e begins, not where it ends.",
        ),
    ),
    sign=_sign,
    cause=_cause,
)


def _no_further_than_threads(f):
    """Whether just the slots below the number of threads came."""
    counts = np.minimum(f.world.data["counts"], f.world.block)
    whole = f.world.data["counts"]
    return (counts < whole).any() and (f.holds("rows", 0) == _rows(counts, _begins(whole))).all()


def _unfilled(f):
    """Whether rows hold messages of slots that are not filled."""
    counts, buf = f.world.data["counts"], _buf()
    held = set((f.before or f).holds("rows", 0).tolist())
    return bool(held & set(buf[np.arange(SLOTS) >= counts[..., None]].tolist()))
