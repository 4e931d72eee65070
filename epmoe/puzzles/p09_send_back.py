"""Puzzle 9: the experts' rows go back to their tokens."""

from itertools import pairwise

import numpy as np

from epmoe.lessons.answers import Wrong
from epmoe.puzzles.judging import Puzzle, accesses
from epmoe.puzzles.world import NOT_YET, Region, World

START = '''"""Puzzle 9: send back.

Combine begins here. The experts have turned every row into a result, and each
goes back to the rank it came from. A block takes the rows of one src_rank:
rows[first] to rows[end - 1]. src_info says for each row its token and its k
(which of the token's top_k choices it was); padding rows have -1, -1 and go
nowhere. The result belongs in returned[token, k] of src_rank. There is a
place for every (token, k), so nobody needs to claim a slot.

When the whole block has written, one thread signals: the number of rows,
end - first, into `word`, a 64-bit word of src_rank.

In NumPy, for each row:
    token, k = src_info[row]
    if token >= 0: returned[src_rank][token, k] = rows[row]

Intrinsics:
    load_i32(address), store_i32(address, value)
    syncthreads()
    st_ORDER_SCOPE_u64(address, u64(value))     relaxed or release
rows, src_info, returned and word are addresses; all numbers of the arrays take
4 bytes, so a row of src_info takes 8.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [12], [12, 2], [N_RANKS + 1], [TOKENS, TOP_K], uint64 [N_RANKS], as RETURNED
ROWS, SRC_INFO, BEGINS, RETURNED, RECV_COUNT, SEEN = 0, 1, 2, 3, 4, 5
N_RANKS, TOKENS, TOP_K = 2, 5, 2
NOT_YET = (1 << 64) - 1


@kernel
def send_back(params, num_tokens, my_rank):
    if block_idx() == N_RANKS:
        receive(params, my_rank)
        return
    src_rank = block_idx()
    begins = region(params, BEGINS, my_rank) + u64(4 * src_rank)
    first, end = load_i32(begins), load_i32(begins + u64(4))
    rows, src_info = region(params, ROWS, my_rank), region(params, SRC_INFO, my_rank)
    returned = region(params, RETURNED, src_rank)
    word = region(params, RECV_COUNT, src_rank) + u64(8 * my_rank)
    # ---- your 10 lines ----

    # -----------------------


@device_fn
def receive(params, my_rank):
    """Given: wait for both ranks, then look at everything that has come back."""
    if thread_idx() < N_RANKS:
        word = region(params, RECV_COUNT, my_rank) + u64(8 * thread_idx())
        while ld_acquire_sys_u64(word) == NOT_YET:
            pass
    syncthreads()
    returned, seen = region(params, RETURNED, my_rank), region(params, SEEN, my_rank)
    i = thread_idx()
    while i < TOKENS * TOP_K:
        store_i32(seen + u64(4 * i), load_i32(returned + u64(4 * i)))
        i += block_dim()
'''

RANKS, TOKENS, TOP_K, ROOM = 2, 5, 2, 12
REGIONS = (
    Region("rows", (ROOM,), axes=("row",)),
    Region("src_info", (ROOM, 2), axes=("row", "token or k")),
    Region("begins", (RANKS + 1,), axes=("src_rank",)),
    Region("returned", (TOKENS, TOP_K), axes=("token", "k")),
    Region("recv_count", (RANKS,), np.uint64, ("rank",)),
    Region("seen", (TOKENS, TOP_K), axes=("token", "k")),
)
ABSENT = 7  # of a place that nothing comes back to


def _world(name, pairs, threads, padding=0):
    """pairs[rank][src_rank]: the (token, k) of its rows, in the order of the rows; behind them padding rows."""
    start = []
    for rank in range(RANKS):
        info, begins = [], [0]
        for src in range(RANKS):
            info += [*pairs[rank][src], *[(-1, -1)] * padding]
            begins.append(len(info))
        padded = np.full((ROOM, 2), -1)
        padded[: len(info)] = np.reshape(info, (-1, 2))
        start.append(
            {
                "rows": 1000 * (rank + 1) + 10 * np.arange(ROOM),
                "src_info": padded,
                "begins": np.array(begins),
                "returned": np.full((TOKENS, TOP_K), ABSENT),
                "recv_count": np.full(RANKS, NOT_YET, np.uint64),
            }
        )
    counts = np.array([np.diff(s["begins"]) for s in start], np.uint64)
    expected = [
        {"returned": back, "recv_count": counts[:, src], "seen": back} for src, back in enumerate(_returned(start))
    ]
    name = f"{name}, blocks of {threads} threads"
    return World(name, REGIONS, (0,) * RANKS, tuple(start), tuple(expected), RANKS + 1, threads)


def _place(token, k):
    return token * TOP_K + k


def _returned(start, place=_place, most=ROOM):
    """`returned` of every rank if the first `most` rows of each segment go to place(token, k), flat."""
    out = np.full((RANKS, TOKENS * TOP_K), ABSENT)
    for of_rank in start:
        for src, (first, end) in enumerate(pairwise(of_rank["begins"])):
            for row in range(first, min(end, first + most)):
                token, k = of_rank["src_info"][row]
                if token >= 0:
                    out[src, place(token, k)] = of_rank["rows"][row]
    return out.reshape(RANKS, TOKENS, TOP_K)


def worlds():
    """One warp; two warps and padding; fewer threads than rows; nothing at all."""
    some = [[[(0, 1), (2, 0), (4, 1)], [(1, 0), (3, 1)]], [[(0, 0), (1, 1), (3, 0)], [(0, 0), (4, 1)]]]
    all_ = [
        [[(t, 0) for t in range(5)], [(t, 1) for t in (4, 2, 0, 1, 3)]],
        [[(t, 1) for t in (3, 1, 0)], [(t, 0) for t in range(5)]],
    ]
    return (
        _world("some rows", some, 32),
        _world("a padding row in each segment", all_, 64, padding=1),
        _world("many rows", all_, 3),
        _world("no row", [[[], []], [[], []]], 8),
    )


def _model(place=_place, most=lambda w: ROOM):
    return lambda w: [{"returned": back} for back in _returned(w.start, place, most(w))]


def _one_signal(puzzle, answer, tell):
    """Praise if every block stores each signal once; otherwise Wrong. The memory is right either way."""
    signals = {}  # word -> the stores into it
    for e in accesses(puzzle, answer, "recv_count"):
        if e.wrote is not None:
            signals.setdefault(e.address, []).append(e)
    stores = max(signals.values(), key=len)
    if len(stores) > 1:
        raise Wrong(
            f"{len(stores)} stores signal the same word ({stores[0].line}): one thread of the block "
            "signals, once.\n\nThe memory is right, but each of these stores is a write to another GPU."
        )
    return "Each block signals once."


def _sign(f):
    if f.differs("recv_count") and f.kind == "wrong":
        return "the signal must hold the number of rows of this src_rank, end - first."
    return None


def _cause(f):
    if (
        f.kind == "bounds"
        and f.says("before returned|of rank|-")
        and f.uses("if |while")
        and not f.uses(r">= ?0|> ?-1|!= ?-1|< ?0|== ?-1")
    ):
        return "a padding row, whose token is -1, is sent: it goes nowhere."
    if f.kind == "bounds":
        return "an address is wrong: src_info has 8 bytes a row, returned 4 bytes for each [token, k]."
    if f.waits_for("recv_count") and f.only_zeros_missing():
        return "a signal for 0 rows is missing, and its receiver waits for ever."
    if f.waits_for("recv_count") and f.no_signal():
        return "no signal is sent: the receivers wait for ever."
    if f.waits_for("recv_count"):
        return "some signals are missing: one goes to each src_rank."
    if f.kind == "hang":
        return "not all threads of the block come to syncthreads: take it out of the loop."
    if f.race_on("recv_count") and f.says("scopes"):
        return "the signal goes to another GPU: its scope is sys."
    if f.race_on("recv_count") and f.says("plain"):
        return "the signal is a plain store, and the receiver polls it: st_release_sys."
    if f.race_on("returned") and f.says("the write is relaxed"):
        return "the signal is relaxed: whoever sees it knows nothing of the rows. Release it."
    if f.race_on("returned") and -1 < f.hole(0).find("word,") < f.hole(0).find("store_i32("):
        return "the signal is sent before the rows are: write first, signal after."
    if f.race_on("returned") and f.says("missing before its release"):
        return "one thread signals while others still write: a syncthreads() is missing before the signal."
    if f.race_on("returned") and f.says("the write at .* ordered after the write"):
        return (
            "two rows go to the same place: begin with row first + thread_idx(), and read the token and the k of each "
            "row, 8 bytes a row."
        )
    if f.race_on("returned"):
        return "the receiver reads a row before its signal."
    if f.differs("returned", "seen"):
        return "a row is at the wrong place, or the wrong row: rows[row] goes to [token, k] of src_info[row]."
    return None


PUZZLE = Puzzle(
    title="Send back",
    line="results return to their tokens; one signal for a block",
    start=START,
    hints=(
        "row = first + thread_idx(), in steps of block_dim(), as long as row < end.",
        "src_info has two int32 a row: the token at 8 * row, k four bytes further. The place is number "
        "token * TOP_K + k of `returned`.",
        "Behind the loop: syncthreads(), then thread 0 alone releases u64(end - first) into `word`, at system scope.",
    ),
    worlds=worlds,
    kernels=("send_back",),
    mistakes=(
        (_model(lambda t, k: k * TOKENS + t), "the axes are the wrong way round: [token, k] is token * TOP_K + k."),
        (_model(lambda t, k: t), "k is missing from the place: [token, k] is token * TOP_K + k."),
        (
            _model(most=lambda w: w.block),
            "each thread sends one row only: it must go on with the row block_dim() further.",
        ),
    ),
    sign=_sign,
    cause=_cause,
    more=_one_signal,
)
