"""Puzzle 14: data that tells by itself that it has arrived."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World

START = '''"""Puzzle 14: drop the signals.

A signal costs a journey: it may leave only when all messages have arrived. It
can be saved if each word of the data tells by itself that it is there. Before
the round every word of recv_buf is ABSENT, a number that is never sent. The
receiver polls the data until no word is ABSENT any more. (TensorRT-LLM's
Lamport all-reduce works like this.)

Two holes:
  put    store the words a, b, c, d at place. If one of them happens to be
         ABSENT, send ESCAPE instead.
  take   poll the 16 bytes at place until all four words have come. Reset the
         place to ABSENT, for the next round. (The return is given.)

In NumPy:
    put:   recv_buf[...] = np.where(words == ABSENT, ESCAPE, words)
    take:  out = recv_buf[...]; recv_buf[...] = ABSENT

Intrinsics:
    load16_relaxed_sys(address)             four uint32, each one by itself
    store16_relaxed_sys(address, a, b, c, d)
The four words may arrive one after another. They need no order among each
other, nor with anything else: that is why relaxed is enough.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

ROWS, RECV_BUF, OUT = 0, 1, 2       # uint32 [ROOM, 4], [N_RANKS, ROOM, 4], [N_RANKS, ROOM, 4]
N_RANKS, ROOM = 2, 6
ABSENT, ESCAPE = 0xFFFFFFFF, 0xFFFFFFFE


@kernel
def exchange(params, num_tokens, my_rank):
    i = thread_idx()
    if block_idx() == 0:            # send every row to both ranks
        rows = region(params, ROWS, my_rank)
        while i < ROOM * N_RANKS:
            row, dst_rank = i // N_RANKS, i % N_RANKS
            a, b, c, d = load16(rows + u64(16 * row))
            put(region(params, RECV_BUF, dst_rank) + u64(16 * (my_rank * ROOM + row)), a, b, c, d)
            i += block_dim()
    else:                           # receive the rows of both ranks
        while i < ROOM * N_RANKS:
            a, b, c, d = take(region(params, RECV_BUF, my_rank) + u64(16 * i))
            store16(region(params, OUT, my_rank) + u64(16 * i), a, b, c, d)
            i += block_dim()


@device_fn
def put(place, a, b, c, d):
    # ---- your 5 lines ----
    pass
    # ----------------------


@device_fn
def take(place):
    a, b, c, d = ABSENT, ABSENT, ABSENT, ABSENT
    # ---- your 3 lines ----

    # ----------------------
    return a, b, c, d
'''

RANKS, ROOM = 2, 6
ABSENT, ESCAPE = 0xFFFFFFFF, 0xFFFFFFFE
OF = ("src_rank", "row", "word")
REGIONS = (
    Region("rows", (ROOM, 4), np.uint32, ("row", "word")),
    Region("recv_buf", (RANKS, ROOM, 4), np.uint32, OF),
    Region("out", (RANKS, ROOM, 4), np.uint32, OF),
)


def _world(name, rows, threads):
    rows = np.asarray(rows, np.uint32)
    nothing = np.full((RANKS, ROOM, 4), ABSENT, np.uint32)
    start = tuple({"rows": of_rank, "recv_buf": nothing} for of_rank in rows)
    out = np.where(rows == ABSENT, np.uint32(ESCAPE), rows)
    expected = {"out": out, "recv_buf": nothing}
    name = f"{name}, blocks of {threads} threads"
    return World(name, REGIONS, (ROOM,) * RANKS, start, (expected,) * RANKS, 2, threads, data=dict(rows=rows))


def worlds():
    """Small numbers; numbers that happen to be ABSENT; zeros."""
    small = 100 * (np.arange(RANKS)[:, None, None] + 1) + np.arange(ROOM * 4).reshape(ROOM, 4)
    absent = small.copy()
    absent[0, 1, 2] = absent[1, 4] = absent[0, 3, 0] = absent[1, 0, 3] = absent[1, 2, 1] = ABSENT
    return (
        _world("small numbers", small, 12),
        _world("fewer threads", small, 5),
        _world("words that happen to be ABSENT", absent, 32),
        _world("zeros", 0 * small, 12),
    )


def _left(words):
    """A model: all rows have come, and words(rows) are left in recv_buf."""
    return lambda w: [{"out": e["out"], "recv_buf": words(e["out"])} for e in w.expected]


def _sign(f):
    if any((m["out"] == ABSENT).all() for m in f.raw):
        return "take does not wait: its words are ABSENT. Poll until all four have come."
    if any((m["out"] == ABSENT).any() for m in f.raw):
        return "a row is taken before all of it has come: wait as long as ANY of its four words is ABSENT."
    if f.differs("out") and all(
        (np.sort(m["out"].ravel()) == np.sort(f.world.expected[0]["out"].ravel())).all() for m in f.raw
    ):
        return "the words are in the wrong order: a, b, c, d."
    if f.differs("out") and (f.world.data["rows"] == ABSENT).any():
        return "a word that happens to be ABSENT must be sent as ESCAPE."
    if f.differs("out") and any((m["out"] == ESCAPE).any() for m in f.raw):
        return "only ABSENT is replaced: all other words travel as they are."
    return None


def _cause(f):
    if f.race_on("recv_buf") and f.says("(load16|store16) |ld_.*plain|plain access"):
        return (
            "recv_buf is polled while a peer writes it, so both need strong words: load16_relaxed_sys and "
            "store16_relaxed_sys."
        )
    if f.race_on("recv_buf") and f.says("both are strong stores"):
        return "ABSENT is stored before the words have come: poll first, until none of the four is ABSENT; reset after."
    if (
        f.kind == "hang"
        and all((m["recv_buf"] == ABSENT).all() for m in f.raw)
        and not f.uses(r"store16_\w+\(place, a")
    ):
        return "put stores nothing, and take waits for ever."
    if f.kind == "hang" and (f.world.data["rows"] == ABSENT).any():
        return "a word that happens to be ABSENT is sent as it is, and take waits for ever: send ESCAPE instead."
    if f.kind == "hang" and (f.world.data["rows"] == 0).all():
        return "a word of 0 is data: only ABSENT has not come yet."
    if f.kind == "hang":
        return "take waits for words that have come, or are gone: reset them once, behind the loop."
    return None


PUZZLE = Puzzle(
    title="Drop the signals",
    line="every word is its own flag (Lamport)",
    start=START,
    hints=(
        "put: four times `if x == ABSENT: x = ESCAPE`, then one store16_relaxed_sys.",
        "take: load again as long as ANY of the four words is ABSENT: or, not and.",
        "take, behind the loop: store16_relaxed_sys(place, ABSENT, ABSENT, ABSENT, ABSENT). The return is given.",
    ),
    worlds=worlds,
    kernels=("exchange",),
    mistakes=(
        (
            _left(lambda out: out),
            "the words are not reset to ABSENT: in the next round old rows would pass for new ones.",
        ),
        (
            lambda w: [{"out": w.data["rows"]}] * RANKS,
            "take turns ESCAPE back into ABSENT: leave it, since a row may hold ESCAPE itself.",
        ),
        (_left(np.zeros_like), "the words are reset to 0, and 0 may be data. What has not come yet is ABSENT."),
    ),
    sign=_sign,
    cause=_cause,
)
