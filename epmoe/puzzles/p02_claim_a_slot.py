"""Puzzle 2: warps claim slots with an atomic."""

import numpy as np

from epmoe.puzzles.judging import Puzzle, shared
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 2: claim a slot.

A warp has a token. If the token wants expert WANTED, the warp claims the next
free slot of `messages` and writes LANES numbers there: its lane i writes
100 * (token + 1) + i at place i of the slot. `reserved` counts the slots that
are taken; it is 0 at first. All warps do this at the same time, so the order
of the tokens in the slots is free.

In NumPy, for one order:
    chosen = np.flatnonzero(experts[:num_tokens] == WANTED)
    reserved = len(chosen)
    messages[:reserved] = 100 * (chosen[:, None] + 1) + np.arange(LANES)

Intrinsics:
    atomic_add_relaxed_gpu_i32(address, n)    adds, returns what was there
    warp_broadcast_i32(value, lane)           all lanes get the value of one
    lane_id()                                 0 to LANES - 1
    store_i32(address, value)
All lanes of the warp must reach warp_broadcast_i32 together.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

EXPERTS, RESERVED, MESSAGES = 0, 1, 2   # int32 [12], [1], [12, LANES]
WANTED = 1
LANES = 32


@kernel
def claim(params, num_tokens, my_rank):
    experts = region(params, EXPERTS, my_rank)
    reserved = region(params, RESERVED, my_rank)
    messages = region(params, MESSAGES, my_rank)
    token = block_idx() * n_warps() + warp_id()
    while token < num_tokens:
        if load_i32(experts + u64(4 * token)) == WANTED:
            # ---- your 4 to 6 lines ----
            pass
            # ---------------------------
        token += grid_dim() * n_warps()
'''

ROOM, LANES, WANTED = 12, 32, 1
REGIONS = (
    Region("experts", (ROOM,), axes=("token",)),
    Region("reserved", (1,), axes=("word",)),
    Region("messages", (ROOM, LANES), axes=("slot", "lane")),
)


def _world(ids, grid, warps):
    ids = np.array([*ids, *[-1] * (ROOM - len(ids))], np.int32)
    tokens = int((ids >= 0).sum())
    chosen = np.flatnonzero(ids == WANTED)
    name = f"{tokens} tokens, {len(chosen)} of them for expert {WANTED}, {many(grid, 'block')} of {many(warps, 'warp')}"
    start = {"experts": ids, "reserved": np.zeros(1)}
    expected = {"reserved": np.array([len(chosen)]), "messages": _messages(chosen, np.arange(len(chosen)))}
    return World(name, REGIONS, (tokens,), (start,), (expected,), grid, 32 * warps, data=dict(chosen=chosen))


def _messages(tokens, slots):
    made = REGIONS[2].unwritten()
    made[slots] = 100 * (tokens[:, None] + 1) + np.arange(LANES)
    return made


def worlds():
    """One warp, then several in a block, then several blocks."""
    return (
        _world([1, 0, 1], 1, 1),
        _world([1, 1, 0, 1, 2, 1], 1, 2),
        _world([0, 1, 1, 1, 0, 2, 1, 1, 1, 1, 0, 1], 3, 2),
        _world([0, 2, 0], 2, 1),
    )


def canonical(memory, world):
    """Slots in the order of what they hold."""
    (m,) = memory
    n = len(world.data["chosen"])
    slots = m["messages"].copy()
    slots[:n] = slots[:n][np.lexsort(slots[:n].T[::-1])]
    return (m | {"messages": slots},)


def _claimed(slots):
    """A model: so many slots are claimed for each token."""
    return lambda w: ({"reserved": np.array([slots * len(w.data["chosen"])])},)


def _sign(f):
    chosen = f.world.data["chosen"]
    if f.differs("messages") and (f.holds("messages") == _messages(chosen, chosen)).all():
        return "a message lies in the slot of its token's number: its slot is what the atomic returns."
    return None


def _cause(f):
    messages = f.holds("messages", 0)
    if f.race_on("reserved") and f.says("scopes"):
        return "the atomic is atomic within a block only (cta), and warps of several blocks claim: gpu."
    if f.race_on("reserved"):
        return (
            "two warps read the same number in `reserved` and take the same slot: read and add in one operation, an "
            "atomic."
        )
    if f.kind == "hang" and f.says("waits at (warp_|shfl)"):
        return "lane 0 alone comes to the warp operation, which waits for all lanes: take it out of the `if`."
    if f.race_on("messages") and f.says("both are in one warp"):
        return "two lanes write to one place: lane i has place i of the slot, which begins at 4 * LANES * slot bytes."
    if f.race_on("messages"):
        return (
            "two warps write to the same slot: each slot comes from the atomic, and reaches all lanes by "
            "warp_broadcast_i32."
        )
    if f.kind == "bounds" and f.holds("reserved", 0)[0] > len(f.world.data["chosen"]):
        return "every lane claims a slot of its own: one lane must claim it for all."
    if f.kind == "wrong" and not (messages[1:] > 0).any():
        return "all tokens go to slot 0: the number from the atomic does not reach the lanes. Which lane has it?"
    if f.kind in ("bounds", "wrong") and (messages[0] == f.world.region("messages").unwritten()[0]).all():
        return "slot 0 stays empty: the atomic returns the number before it added, which is the slot."
    if f.differs("messages") and any(len(set((slot // 100).tolist())) > 1 for slot in messages):
        return "the lanes of a warp do not agree on the slot: only lane 0 knows it until it is broadcast."
    if f.kind == "bounds":
        return "an address is outside `messages`: slot s begins 4 * LANES * s bytes behind the first."
    if f.differs("messages"):
        return "the slots are right, and what is written there is not: lane i writes 100 * (token + 1) + i at place i."
    return None


PUZZLE = Puzzle(
    title="Claim a slot",
    line="warps take places in a queue with an atomic",
    start=START,
    hints=(
        "One slot for the whole warp, so one lane claims it. The others must be told which it is.",
        "slot = 0, then lane 0 alone adds 1 to `reserved` and keeps what the atomic returns.",
        "slot = warp_broadcast_i32(slot, 0), outside of the `if`; then every lane stores one number "
        "at messages + u64(4 * (slot * LANES + lane_id())).",
    ),
    worlds=worlds,
    kernels=("claim",),
    canonical=canonical,
    mistakes=(
        (_claimed(0), "nothing has been claimed: `reserved` is still 0."),
        (_claimed(LANES), "every lane claims a slot of its own: one lane must claim it for all."),
        (_claimed(2), "a slot is claimed twice for each token: add 1, once."),
        (lambda w: ({"messages": w.region("messages").unwritten()},), "slots are claimed, but no message is written."),
    ),
    sign=_sign,
    cause=_cause,
    more=shared("messages"),
)
