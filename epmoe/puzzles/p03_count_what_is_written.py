"""Puzzle 3: a warp counts a message when all of it is written."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 3: count what is written.

Blocks 1, 2, ... write messages. Each of their warps takes a token and writes
its message: lane i stores `value` at `place`. Then the warp adds 1 to
`finished`, once. Block 0 reads `finished` until all num_tokens messages are
counted, then copies all messages. It must find every one of them written.

Write both: the store and the count.

In NumPy:
    messages[:num_tokens] = ...         value, at place
    finished += num_tokens              never before its message is there

Intrinsics:
    store_i32(address, value)
    syncwarp()                          all lanes of the warp meet, and each
                                        sees what the others have done before
    red_add_ORDER_SCOPE_i32(address, n) adds; ORDER is relaxed or release,
                                        SCOPE is cta, gpu or sys
"""

from epmoe.device import *
from epmoe.puzzles.given import region

FINISHED, MESSAGES, SEEN = 0, 1, 2      # int32 [1], [9, LANES], [9, LANES]
LANES = 32


@kernel
def count(params, num_tokens, my_rank):
    finished = region(params, FINISHED, my_rank)
    messages = region(params, MESSAGES, my_rank)
    seen = region(params, SEEN, my_rank)
    if block_idx() == 0:
        if thread_idx() == 0:
            while ld_acquire_gpu_i32(finished) < num_tokens:
                pass
        syncthreads()
        i = thread_idx()
        while i < num_tokens * LANES:
            store_i32(seen + u64(4 * i), load_i32(messages + u64(4 * i)))
            i += block_dim()
        return
    token = (block_idx() - 1) * n_warps() + warp_id()
    while token < num_tokens:
        place = messages + u64(4 * (token * LANES + lane_id()))
        value = 100 * (token + 1) + lane_id()
        # ---- your 4 lines ----
        pass
        # ----------------------
        token += (grid_dim() - 1) * n_warps()
'''

ROOM, LANES = 9, 32
REGIONS = (
    Region("finished", (1,), axes=("word",)),
    Region("messages", (ROOM, LANES), axes=("token", "lane")),
    Region("seen", (ROOM, LANES), axes=("token", "lane")),
)


def _world(n, writers, warps):
    messages = REGIONS[1].unwritten(100 * (np.arange(n)[:, None] + 1) + np.arange(LANES))
    name = f"{many(n, 'token')}, {many(writers, 'block')} of {many(warps, 'warp')} to write them"
    expected = {"finished": np.array([n]), "messages": messages, "seen": messages}
    start = {"finished": np.zeros(1)}
    return World(name, REGIONS, (n,), (start,), (expected,), 1 + writers, 32 * warps)


def worlds():
    """A warp, several in a block, several blocks; no token at all."""
    return _world(1, 1, 1), _world(3, 1, 2), _world(9, 2, 2), _world(0, 1, 1)


def _cause(f):
    if f.waits_for("finished") and (f.holds("messages", 0)[: f.world.tokens[0]] < 0).any():
        return "nothing is written yet, and nothing counted: block 0 waits for ever."
    if f.waits_for("finished"):
        return "messages are written and not counted: block 0 waits for `finished` for ever."
    if f.race_on("finished") and f.says("scopes"):
        return "`finished` is used by several blocks: cta is too narrow a scope."
    if f.race_on("finished"):
        return "`finished` is changed by several warps at once, and read meanwhile: add with a red_add_."
    if f.race_on("messages") and f.says("the write is relaxed"):
        return "the count says nothing about the message: a relaxed addition orders nothing. Release it."
    if f.race_on("messages") and f.says("a syncwarp or syncthreads is missing before") and f.uses(r"sync\w+\("):
        return "the barrier is in the wrong place: syncwarp() stands behind the store and before the `if`, so that all meet."
    if f.race_on("messages") and f.says("a syncwarp or syncthreads is missing before"):
        return (
            "lane 0 counts when it has written itself, and other lanes have not yet: a syncwarp() is missing between "
            "the store and the count."
        )
    if f.race_on("messages") and f.says("release comes before it|here the read came first"):
        return "the message is counted before it is written: store first, count after."
    if f.race_on("messages") and f.says("scopes"):
        return "the reader is another block: cta is too narrow a scope for the count."
    if f.differs("finished"):
        return "`finished` must grow by 1 for each message."
    if f.differs("messages") and (f.holds("messages", 0) > 0).any():
        return "parts of the messages are missing or wrong: each lane stores its own `value` at its own `place`."
    if f.differs("messages"):
        return "the messages are counted, and never written."
    return None


PUZZLE = Puzzle(
    title="Count what is written",
    line="a message counts when all lanes have written their part",
    start=START,
    hints=(
        "Three things in this order: every lane stores; the warp meets; one lane counts.",
        "The reader acquires `finished`. So the addition must release, and its scope must include "
        "another block of the same GPU.",
        "store_i32(place, value)\nsyncwarp()\nif lane_id() == 0:\n    red_add_..._i32(finished, 1)",
    ),
    worlds=worlds,
    kernels=("count",),
    mistakes=(
        (
            lambda w: ({"finished": np.array([LANES * w.tokens[0]])},),
            "every lane counts: a message is counted 32 times. One lane must count for the warp.",
        ),
    ),
    cause=_cause,
)
