"""Puzzle 12: two kernels become one."""

import ast

import numpy as np

from epmoe.puzzles.holes import holes_of
from epmoe.puzzles.judging import Puzzle, shared
from epmoe.puzzles.world import NOT_YET, Region, World, many

START = '''"""Puzzle 12: fuse async and wait.

Dispatch as two launches, with the device functions that are given below:

    async:  for each token:    send      a message into the expert's rank
            for each expert:   signal    wait until its messages are written,
                                         then tell the expert's rank
    wait:   for each segment:  receive   wait for its signal, copy its messages
            once:              clean     reset the counters of this rank to 0

In each launch the work is dealt out: block b takes number b, b + grid_dim(),
and so on. Write the same as ONE kernel, which saves a launch. What the end of
the async launch did for you before, you must do yourself now. Think of each
function that waits: who sends what it waits for, and can that block get there?
And when is it safe to clean?

`done` is a counter for you, 0 at first; clean resets it too. Blocks
have one thread here. Two rounds follow one another on the same counters.

Intrinsics:
    send(params, token, my_rank)
    signal(params, expert, num_tokens, my_rank)
    receive(params, segment, my_rank)
    clean(params, my_rank)
    block_idx(), grid_dim()
    atomic_add_acq_rel_gpu_i32(address, n)
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [7], [EXPERTS], [EXPERTS], [1], [SEGMENTS, 7], uint64 [SEGMENTS], int32 [SEGMENTS, 7]
IDS, RESERVED, FINISHED, DONE, RECV_BUF, RECV_COUNT, SEEN = 0, 1, 2, 3, 4, 5, 6
N_RANKS, EXPERTS, LOCAL, SEGMENTS, SLOTS = 2, 4, 2, 4, 7
NOT_YET = (1 << 64) - 1


@kernel
def dispatch(params, num_tokens, my_rank):
    done = region(params, DONE, my_rank)
    # ---- your 11 lines ----

    # -----------------------


@device_fn
def send(params, token, my_rank):
    """Given: a message for one token, counted when it is written."""
    expert = load_i32(region(params, IDS, my_rank) + u64(4 * token))
    slot = atomic_add_relaxed_gpu_i32(region(params, RESERVED, my_rank) + u64(4 * expert), 1)
    place = (expert % LOCAL * N_RANKS + my_rank) * SLOTS + slot
    recv_buf = region(params, RECV_BUF, expert // LOCAL)
    store_i32(recv_buf + u64(4 * place), 100 * (my_rank + 1) + token)
    red_add_release_gpu_i32(region(params, FINISHED, my_rank) + u64(4 * expert), 1)


@device_fn
def signal(params, expert, num_tokens, my_rank):
    """Given: wait until all messages for an expert are written; then its signal."""
    count = 0
    for token in range(num_tokens):
        if load_i32(region(params, IDS, my_rank) + u64(4 * token)) == expert:
            count += 1
    finished = region(params, FINISHED, my_rank) + u64(4 * expert)
    while ld_acquire_gpu_i32(finished) != count:
        pass
    words = region(params, RECV_COUNT, expert // LOCAL)
    st_release_sys_u64(words + u64(8 * (expert % LOCAL * N_RANKS + my_rank)), u64(count))


@device_fn
def receive(params, segment, my_rank):
    """Given: wait for the signal of a segment, copy its messages, reset the word."""
    word = region(params, RECV_COUNT, my_rank) + u64(8 * segment)
    count = ld_acquire_sys_u64(word)
    while count == NOT_YET:
        count = ld_acquire_sys_u64(word)
    store_u64(word, u64(NOT_YET))
    for slot in range(i32(count)):
        at = u64(4 * (segment * SLOTS + slot))
        message = load_i32(region(params, RECV_BUF, my_rank) + at)
        store_i32(region(params, SEEN, my_rank) + at, message)


@device_fn
def clean(params, my_rank):
    """Given: reset all counters of this rank."""
    for expert in range(EXPERTS):
        store_i32(region(params, RESERVED, my_rank) + u64(4 * expert), 0)
        store_i32(region(params, FINISHED, my_rank) + u64(4 * expert), 0)
    store_i32(region(params, DONE, my_rank), 0)
'''

RANKS, EXPERTS, LOCAL, SEGMENTS, SLOTS, ROUNDS = 2, 4, 2, 4, 7, 2
OF = ("round", "segment", "slot")
REGIONS = (
    Region("ids", (SLOTS,), axes=("token",)),
    Region("reserved", (EXPERTS,), axes=("expert",)),
    Region("finished", (EXPERTS,), axes=("expert",)),
    Region("done", (1,), axes=("word",)),
    Region("recv_buf", (ROUNDS, SEGMENTS, SLOTS), axes=OF, by_round=True),
    Region("recv_count", (ROUNDS, SEGMENTS), np.uint64, OF, by_round=True),
    Region("seen", (ROUNDS, SEGMENTS, SLOTS), axes=OF, by_round=True),
)


def _world(ids, grid):
    start, expected = [], []
    for rank in range(RANKS):
        seen = REGIONS[6].unwritten()
        for le, src in np.ndindex(LOCAL, RANKS):
            tokens = np.flatnonzero(np.array(ids[src], int) == rank * LOCAL + le)
            seen[:, le * RANKS + src, : len(tokens)] = 100 * (src + 1) + tokens
        counters = {"reserved": np.zeros(EXPERTS), "finished": np.zeros(EXPERTS), "done": np.zeros(1)}
        words = {"recv_count": np.full((ROUNDS, SEGMENTS), NOT_YET, np.uint64)}
        padded = np.pad(ids[rank], (0, SLOTS - len(ids[rank])), constant_values=-1)
        start.append({"ids": padded} | counters | words)
        expected.append({"seen": seen} | words | counters)
    tokens = tuple(len(i) for i in ids)
    name = f"ranks with {tokens[0]} and {tokens[1]} tokens, {many(grid, 'block')} each, {ROUNDS} rounds"
    return World(name, REGIONS, tokens, tuple(start), tuple(expected), grid, 1, rounds=ROUNDS)


def worlds():
    """Some blocks for each; one block that does everything; more blocks than work."""
    return (
        _world([[0, 1, 2, 3, 2, 3], [3, 2, 1, 0]], 3),
        _world([[0, 2, 3], [1, 2]], 1),
        _world([[2, 2, 0, 2, 2, 1, 1], [1]], 7),
        _world([[], [3, 0, 3]], 2),
    )


def canonical(memory, world):
    """Messages of a segment in the order of their numbers."""

    def in_order(seen):
        return np.where(seen < 0, seen, np.sort(np.where(seen < 0, 2**30, seen), axis=-1))

    return tuple(m | {"seen": in_order(m["seen"])} for m in memory)


def _sent(f):
    """Whether any message has been written."""
    return any((m["recv_buf"] > 0).any() for m in f.raw)


TOO_EARLY = "the counters are reset while other blocks still use them: only the last block to end may clean."
LAST = (
    "the counters are reset while other blocks still use them: the block that finds grid_dim() - 1 "
    "in `done` is the last."
)


def _sign(f):
    if (
        all((m["seen"] < 0).all() for m in f.raw)
        and not any(m["reserved"].any() or m["done"].any() for m in f.raw)
        and not _sent(f)
    ):
        return "nothing is sent yet."
    if f.differs("recv_count", "seen") and _sent(f) and not f.uses("receive"):
        return "nothing is received."
    if f.differs("recv_count", "seen") and f.uses("receive"):
        return "some segments are not received: their blocks must go on by grid_dim()."
    if f.differs("reserved", "finished", "done") and (f.holds("reserved") != 0).any():
        return "the counters are not reset to 0."
    return None


def _cause(f):
    if f.waits_for("recv_count") and f.uses("clean") and not f.uses("signal"):
        return "nobody signals: the receivers wait for ever."
    if f.waits_for("recv_count") and not f.waits_for("finished") and _order(f, "receive", "signal"):
        return "blocks wait for signals that they have not sent themselves: signal first, receive after."
    if f.waits_for("finished") and _order(f, "signal", "send"):
        return "a block waits for messages that it has yet to write itself: all its sends come before its signals."
    if f.waits_for("finished") and not f.uses("clean"):
        return "the counters are not reset: the next round waits for a count that is already exceeded."
    if f.waits_for("finished") and not f.uses("while|range|for"):
        return "not all tokens are sent: a block goes on with token + grid_dim()."
    if f.waits_for("finished") and _in_one_loop(f, "send(", "signal("):
        return "a block waits for messages that it has yet to write itself: all its sends come before its signals."
    if f.kind == "hang" and f.uses("clean") and not f.uses("done"):
        return TOO_EARLY
    if f.kind == "hang" and f.uses("clean") and not f.uses(r"grid_dim\(\) *- *1"):
        return LAST
    if f.waits_for("finished"):
        return (
            "a count in `finished` is never reached: a token is not sent, is sent twice, or the counters are reset "
            "while others still count."
        )
    if f.waits_for("recv_count") and _in_one_loop(f, "signal(", "receive("):
        return (
            "a block waits for a signal while it has signals to send itself: all its signals come before its receives."
        )
    if f.waits_for("recv_count"):
        return (
            "some signals are never sent: each expert has one, also of a rank without tokens; a block goes on by "
            "grid_dim()."
        )
    if f.race_on("reserved", "finished", "done") and not f.uses("done"):
        return TOO_EARLY
    if f.race_on("reserved", "finished", "done") and f.uses("_relaxed_"):
        return "`done` is counted by a relaxed atomic: the last block must acquire what the others release."
    if f.race_on("reserved", "finished", "done") or f.differs("reserved", "finished", "done"):
        return LAST
    if f.kind == "bounds":
        return "a message goes outside its segment: a token is sent twice, or the counters are not reset to 0."
    return None


PUZZLE = Puzzle(
    title="Fuse async and wait",
    line="one launch for both halves, without a hang",
    start=START,
    hints=(
        "Three loops with the same stride, one behind the other: send, signal, receive. In which order "
        "can no block wait for itself?",
        "All sends, then all signals, then all receives: what a block waits for is always done by blocks "
        "in an earlier loop.",
        "A block that has ended its loops cannot know that the others have. Puzzle 11: the last one, "
        "found by atomic_add_acq_rel_gpu_i32(done, 1), cleans.",
    ),
    worlds=worlds,
    kernels=("dispatch",),
    canonical=canonical,
    sign=_sign,
    cause=_cause,
    more=shared("recv_buf"),
)


def _order(f, first, second):
    """Whether the first call of one function precedes the other's in the student's lines."""
    text = "".join(holes_of(f.source))
    places = [text.find(f"{name}(") for name in (first, second)]
    return places[0] >= 0 and (places[1] < 0 or places[0] < places[1])


def _in_one_loop(f, *calls):
    """Whether a loop makes both calls."""
    loops = [n for n in ast.walk(ast.parse(f.source)) if isinstance(n, (ast.For, ast.While))]
    return any(all(call in ast.unparse(n) for call in calls) for n in loops)
