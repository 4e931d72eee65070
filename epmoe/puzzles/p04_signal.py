"""Puzzle 4: a signal to another rank, after all messages for an expert are written."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import NOT_YET, Region, World, many

START = '''"""Puzzle 4: signal.

Two ranks with two experts each. Block 0 of a rank signals, the last block
receives, the blocks between them write messages into the memory of the rank
that has the expert, and count them in `finished` (puzzle 3). Experts
0 to EXPERTS - 1 are numbered over all ranks: expert e belongs to rank
e // LOCAL and is there local expert e % LOCAL.

For each expert: `count` tokens of this rank go to it. When `count` messages
for it are finished, write the count into recv_count[local expert, my_rank] of
the expert's rank. That is the signal. It is sent for a count of 0 too, or the
receiver would wait for ever. Before the signal the word holds NOT_YET.

In NumPy, for rank r:
    for e in range(EXPERTS):
        recv_count[e // LOCAL][e % LOCAL, r] = np.sum(ids[:num_tokens] == e)

Intrinsics:
    ld_ORDER_SCOPE_i32(address)                 relaxed or acquire
    st_ORDER_SCOPE_u64(address, u64(value))     relaxed or release
    region(params, RECV_COUNT, rank)            recv_count of that rank
An int32 takes 4 bytes, a uint64 takes 8.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [7], int32 [EXPERTS], int32 [LOCAL, N_RANKS, 7], uint64 [LOCAL, N_RANKS], as RECV_BUF
IDS, FINISHED, RECV_BUF, RECV_COUNT, SEEN = 0, 1, 2, 3, 4
N_RANKS, EXPERTS, LOCAL, SLOTS = 2, 4, 2, 7
NOT_YET = (1 << 64) - 1


@kernel
def signal(params, num_tokens, my_rank):
    ids, finished = region(params, IDS, my_rank), region(params, FINISHED, my_rank)
    if block_idx() == 0:
        for expert in range(EXPERTS):
            count = 0
            for token in range(num_tokens):
                if load_i32(ids + u64(4 * token)) == expert:
                    count += 1
            # ---- your 4 lines ----
            pass
            # ----------------------
    elif block_idx() == grid_dim() - 1:
        receive(params, my_rank)
    else:
        token = block_idx() - 1
        while token < num_tokens:
            write(params, ids, finished, token, my_rank)
            token += grid_dim() - 2


@device_fn
def write(params, ids, finished, token, my_rank):
    """Given: a message, into the slot that tells how many tokens before it go there."""
    expert, slot = load_i32(ids + u64(4 * token)), 0
    for before in range(token):
        if load_i32(ids + u64(4 * before)) == expert:
            slot += 1
    place = (expert % LOCAL * N_RANKS + my_rank) * SLOTS + slot
    recv_buf = region(params, RECV_BUF, expert // LOCAL)
    store_i32(recv_buf + u64(4 * place), 100 * (my_rank + 1) + token)
    red_add_release_gpu_i32(finished + u64(4 * expert), 1)


@device_fn
def receive(params, my_rank):
    """Given: wait for each signal, then copy the messages that it counts."""
    recv_buf, seen = region(params, RECV_BUF, my_rank), region(params, SEEN, my_rank)
    for segment in range(LOCAL * N_RANKS):
        word = region(params, RECV_COUNT, my_rank) + u64(8 * segment)
        while ld_acquire_sys_u64(word) == NOT_YET:
            pass
        for slot in range(min(ld_relaxed_sys_u64(word), SLOTS)):
            at = u64(4 * (segment * SLOTS + slot))
            store_i32(seen + at, load_i32(recv_buf + at))
'''

RANKS, EXPERTS, LOCAL, SLOTS = 2, 4, 2, 7
REGIONS = (
    Region("ids", (SLOTS,), axes=("token",)),
    Region("finished", (EXPERTS,), axes=("expert",)),
    Region("recv_buf", (LOCAL, RANKS, SLOTS), axes=("local_expert", "src_rank", "slot")),
    Region("recv_count", (LOCAL, RANKS), np.uint64, ("local_expert", "src_rank")),
    Region("seen", (LOCAL, RANKS, SLOTS), axes=("local_expert", "src_rank", "slot")),
)


def _world(ids, writers):
    ids = [np.array(of_rank, np.int32) for of_rank in ids]
    start, expected = [], []
    for rank in range(RANKS):
        buf, counts = REGIONS[2].unwritten(), _counts(ids, rank)
        for src, le in np.ndindex(RANKS, LOCAL):
            tokens = np.flatnonzero(ids[src] == rank * LOCAL + le)
            buf[le, src, : len(tokens)] = 100 * (src + 1) + tokens
        padded = np.pad(ids[rank], (0, SLOTS - len(ids[rank])), constant_values=-1)
        words = np.full((LOCAL, RANKS), NOT_YET, np.uint64)
        start.append({"ids": padded, "finished": np.zeros(EXPERTS), "recv_count": words})
        expected.append({"recv_count": counts, "recv_buf": buf, "seen": buf})
    tokens = tuple(len(of_rank) for of_rank in ids)
    name = f"ranks with {tokens[0]} and {tokens[1]} tokens, {many(writers, 'writing block')} each"
    return World(name, REGIONS, tokens, tuple(start), tuple(expected), 2 + writers, 1, data=dict(ids=ids))


def _counts(ids, rank):
    return np.array([[np.sum(i == rank * LOCAL + le) for i in ids] for le in range(LOCAL)], np.uint64)


def worlds():
    """Every expert has tokens; some have none; a rank has none."""
    return (
        _world([[0, 1, 2, 3, 2, 3], [3, 2, 1, 0]], 1),
        _world([[0, 1, 2, 3, 2, 1], [3, 0, 3, 2, 1]], 2),
        _world([[2, 2, 0, 2, 2], [1]], 2),
        _world([[3, 1, 3, 1, 3, 0, 2], []], 3),
    )


def _all(value):
    """A model: every signal holds value(count)."""
    return lambda w: [{"recv_count": value(_counts(w.data["ids"], rank))} for rank in range(RANKS)]


WRONG_WORD = (
    "a signal holds the wrong number, or is at the wrong place: the count of expert e goes to [e % LOCAL, my_rank]."
)


def _cause(f):
    if f.waits_for("recv_count") and f.no_signal():
        return "no signal has been sent: the receivers wait for ever."
    if f.waits_for("recv_count") and f.only_zeros_missing():
        return "an expert without tokens gets no signal, and its receiver waits for ever: send counts of 0 too."
    if f.waits_for("recv_count") and _at_home(f):
        return "the signals lie at home: they belong in recv_count of the expert's rank, expert // LOCAL."
    if f.waits_for("finished"):
        return "block 0 waits for a number in `finished` that never comes: the count of this very expert."
    if f.waits_for("recv_count"):
        return (
            "a signal is missing or at the wrong place: each expert gets one, its index is [expert % LOCAL, my_rank], "
            "and my_rank is the sender."
        )
    if f.kind == "bounds":
        return "an address is wrong: recv_count of a rank has LOCAL * N_RANKS words, of 8 bytes."
    if f.race_on("recv_count") and f.says("scopes"):
        return "the scope of the signal is too narrow: it goes to another GPU, so sys."
    if f.race_on("recv_count") and f.says("plain"):
        return "the signal is a plain store, and the receiver reads it meanwhile: store with st_release_sys."
    if f.race_on("finished") and f.says("plain"):
        return "`finished` is read by a plain load while blocks add to it: load with ld_acquire_gpu."
    if f.race_on("finished") and f.says("scopes"):
        return "`finished` is written by other blocks: cta is too narrow a scope."
    if f.race_on("recv_buf") and f.says("the read is relaxed"):
        return "block 0 sees the count and does not acquire what was written: a relaxed load orders nothing."
    if f.race_on("recv_buf") and f.says("the write is relaxed"):
        return "the signal is relaxed: whoever sees it knows nothing of the messages. Release it."
    if f.race_on("recv_buf") and f.before and f.before.differs("recv_count"):
        return WRONG_WORD
    if f.race_on("recv_buf") or f.differs("seen"):
        return "a signal is sent before all messages are written: wait for finished[expert] first."
    if f.differs("recv_count") and f.kind == "wrong":
        return WRONG_WORD
    return None


PUZZLE = Puzzle(
    title="Signal",
    line="tell another rank that its messages are there",
    start=START,
    hints=(
        "Wait in a loop until finished[expert] is the count; then one store to the expert's rank.",
        "The load must acquire what the writing blocks released: same GPU. The store must release it "
        "to another GPU: sys.",
        "The word is number (expert % LOCAL) * N_RANKS + my_rank of region(params, RECV_COUNT, "
        "expert // LOCAL): the receiver sorts by who sent.",
    ),
    worlds=worlds,
    kernels=("signal",),
    mistakes=(
        (_all(lambda c: c + np.uint64(1)), "the signal holds the count, not one more."),
        (_all(np.ones_like), "the signal must hold the count, not just a 1."),
    ),
    cause=_cause,
)


def _at_home(f):
    """Whether rank 0 has the counts for the experts of rank 1, and nobody has anything from another rank."""
    mine = [int((f.world.data["ids"][0] == LOCAL + le).sum()) for le in range(LOCAL)]
    return f.holds("recv_count", 0)[:, 0].tolist() == mine and all(
        (m["recv_count"][:, 1 - r] == NOT_YET).all() for r, m in enumerate(f.raw)
    )
