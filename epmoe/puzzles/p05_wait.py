"""Puzzle 5: wait for signals, and reset them."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import NOT_YET, Region, World, many

START = '''"""Puzzle 5: wait.

The other side of puzzle 4. Block 0 of each rank sends messages and signals to
both ranks. Block 1 receives. There are SEGMENTS signals, one for each (local
expert, src_rank): 64-bit words of recv_count that hold NOT_YET until the count
arrives. Thread i waits for signal i, writes the count to counts[i], and resets
the word to NOT_YET, for the next round. Threads from SEGMENTS on have no
signal. After your lines all threads of the block read all counts and copy all
messages. So each must see by then what every other thread has seen and stored.

In NumPy:
    counts[:] = recv_count          once no word is NOT_YET any more
    recv_count[:] = NOT_YET

Intrinsics:
    ld_ORDER_SCOPE_u64(address)     relaxed or acquire; cta, gpu or sys
    store_i32(address, i32(value)), store_u64(address, u64(value))
    syncthreads()                   all threads of the block meet, and each
                                    sees what the others have done or acquired
All threads of the block must reach syncthreads().
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [N_RANKS, LOCAL], int32 [LOCAL, N_RANKS, SLOTS], uint64 [SEGMENTS], int32 [SEGMENTS], as RECV_BUF
TO_SEND, RECV_BUF, RECV_COUNT, COUNTS, SEEN = 0, 1, 2, 3, 4
N_RANKS, LOCAL, SLOTS, SEGMENTS = 2, 2, 5, 4
NOT_YET = (1 << 64) - 1


@kernel
def wait(params, num_tokens, my_rank):
    if block_idx() == 0:
        send(params, my_rank)
        return
    recv_count, counts = region(params, RECV_COUNT, my_rank), region(params, COUNTS, my_rank)
    i = thread_idx()
    # ---- your 7 lines ----

    # ----------------------
    recv_buf, seen = region(params, RECV_BUF, my_rank), region(params, SEEN, my_rank)
    while i < SEGMENTS * SLOTS:
        if i % SLOTS < load_i32(counts + u64(4 * (i // SLOTS))):
            store_i32(seen + u64(4 * i), load_i32(recv_buf + u64(4 * i)))
        i += block_dim()


@device_fn
def send(params, my_rank):
    """Given: the messages of this rank for both ranks, and their signals."""
    if thread_idx() == 0:
        for dst_rank in range(N_RANKS):
            for local_expert in range(LOCAL):
                at = u64(4 * (dst_rank * LOCAL + local_expert))
                count = load_i32(region(params, TO_SEND, my_rank) + at)
                segment = local_expert * N_RANKS + my_rank
                for slot in range(count):
                    place = region(params, RECV_BUF, dst_rank) + u64(4 * (segment * SLOTS + slot))
                    store_i32(place, 100 * (my_rank + 1) + 10 * local_expert + slot)
                word = region(params, RECV_COUNT, dst_rank) + u64(8 * segment)
                st_release_sys_u64(word, u64(count))
'''

RANKS, LOCAL, SLOTS = 2, 2, 5
AXES = ("local_expert", "src_rank", "slot")
REGIONS = (
    Region("to_send", (RANKS, LOCAL), axes=("dst_rank", "local_expert")),
    Region("recv_buf", (LOCAL, RANKS, SLOTS), axes=AXES),
    Region("recv_count", (LOCAL, RANKS), np.uint64, AXES),
    Region("counts", (LOCAL, RANKS), axes=AXES),
    Region("seen", (LOCAL, RANKS, SLOTS), axes=AXES),
)


def _world(counts, threads):
    """counts[src_rank][dst_rank][local_expert]"""
    start, expected = [], []
    for rank in range(RANKS):
        mine = np.array([[counts[src][rank][le] for src in range(RANKS)] for le in range(LOCAL)])
        buf = REGIONS[1].unwritten()
        for le, src in np.ndindex(LOCAL, RANKS):
            n = mine[le, src]
            buf[le, src, :n] = 100 * (src + 1) + 10 * le + np.arange(n)
        nothing = np.full((LOCAL, RANKS), NOT_YET, np.uint64)
        start.append({"to_send": np.array(counts[rank]), "recv_count": nothing})
        expected.append({"counts": mine, "seen": buf, "recv_count": nothing, "recv_buf": buf})
    name = f"blocks of {threads} threads, {many(np.sum(counts), 'message')}"
    return World(name, REGIONS, (0,) * RANKS, tuple(start), tuple(expected), 2, threads)


def worlds():
    """A warp; two warps; hardly more threads than signals; no message at all."""
    return (
        _world([[[1, 2], [3, 1]], [[2, 1], [1, 5]]], 32),
        _world([[[0, 2], [0, 1]], [[5, 0], [1, 0]]], 64),
        _world([[[3, 2], [2, 1]], [[1, 4], [1, 2]]], 5),
        _world([[[0, 0], [0, 0]], [[0, 0], [0, 0]]], 40),
    )


TOOK = (
    "a thread took NOT_YET for a count: it must look again until the word has changed. A single "
    "look is not enough, and threads from SEGMENTS on have no signal."
)

RESET_TOO_EARLY = "a signal was reset before it was read, and is lost: load it, keep it, then reset the word."


def _sign(f):
    if f.uses("[!=]= *-1") and any((m["counts"] == -1).any() for m in f.raw):
        return "the word is unsigned, so it never equals -1: compare it with NOT_YET."
    if f.uses("while") and _lost(f):
        return RESET_TOO_EARLY
    if any((m["counts"] == -1).any() for m in f.raw):
        return TOOK
    if f.differs("recv_count") and not f.uses("while"):
        return (
            "each signal is looked at once, and one that comes later is never taken: look again, in a while loop, until "
            "the word has changed."
        )
    return None


def _cause(f):
    if f.waits_for("recv_count") and f.says("which holds NOT_YET") and all((m["counts"] < 0).any() for m in f.raw):
        return RESET_TOO_EARLY
    if f.waits_for("recv_count"):
        return "a thread goes on waiting although its signal is there: a count of 0 is a signal, NOT_YET is none."
    if f.kind == "hang" and f.says("waits at syncthreads"):
        return "not all threads come to syncthreads: take it out of the `if`."
    if f.kind == "bounds" and f.uses("SEGMENTS") and f.says("after the start of counts"):
        return "an address is outside `counts`: it has 4 bytes for each signal, so counts[i] is counts + u64(4 * i)."
    if f.kind == "bounds" and not f.uses("SEGMENTS"):
        return "a thread looks beyond recv_count: threads from SEGMENTS on have no signal."
    if f.kind == "bounds":
        return TOOK
    if f.race_on("recv_count") and f.says("scopes"):
        return "the scope is too narrow: the signal comes from another GPU, so sys."
    if f.race_on("recv_count") and f.says("plain"):
        return "recv_count is read by a plain load while peers write it: poll with ld_acquire_sys."
    if f.race_on("recv_count"):
        return "the word is reset while its signal may still be on the way: wait for it first."
    if f.race_on("counts") and f.uses("syncthreads"):
        return "not all threads meet behind the stores: syncthreads() stands behind the `if`, not in it."
    if f.race_on("counts"):
        return "threads read counts that other threads of the block have just written: a syncthreads() is missing."
    if f.race_on("recv_buf") and f.says("the read is relaxed"):
        return "the signal is seen by a relaxed load, which orders nothing: the messages may be old. Acquire it."
    if f.race_on("recv_buf"):
        return "messages are read by threads that do not know of their signal: a syncthreads() is missing."
    return None


PUZZLE = Puzzle(
    title="Wait",
    line="poll the signals of all peers, and tell the whole block",
    start=START,
    hints=(
        "Threads below SEGMENTS poll; the others go straight to the meeting.",
        "count = ld_..._u64(word), then a while loop that loads again as long as it is NOT_YET. The "
        "signal comes from another GPU and announces messages: acquire, sys.",
        "After the loop: store_i32 into counts, store_u64 of NOT_YET into the word. Behind the `if`, "
        "at the indentation of `i = thread_idx()`: syncthreads().",
    ),
    worlds=worlds,
    kernels=("wait",),
    mistakes=(
        (
            lambda w: [{"recv_count": e["counts"].astype(np.uint64), "counts": e["counts"]} for e in w.expected],
            "recv_count is not reset: the next round would take these counts for its own. Store NOT_YET.",
        ),
        (
            lambda w: [{"recv_count": np.zeros((LOCAL, RANKS), np.uint64)} for _ in w.expected],
            'recv_count is reset to 0, which is a count. "Nothing came yet" is NOT_YET.',
        ),
        (
            lambda w: [{"counts": REGIONS[3].unwritten()} for _ in w.expected],
            "`counts` is never written: wait for each signal, and store its count into counts[i].",
        ),
    ),
    sign=_sign,
    cause=_cause,
)


def _lost(f):
    """Whether NOT_YET was taken for counts, and their signals are gone."""
    taken = [m["recv_count"].ravel()[m["counts"].ravel() == -1] for m in f.raw]
    return any(map(len, taken)) and all((words == NOT_YET).all() for words in taken)
