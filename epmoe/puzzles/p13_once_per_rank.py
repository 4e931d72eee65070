"""Puzzle 13: a token goes to each rank once."""

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many

START = '''"""Puzzle 13: send once per rank.

Two of a token's experts often live on the same rank. Then its row need not
travel twice. Send it once to each rank that has any of the token's experts,
with a mask that tells for which k: bit k is set if that rank has the expert
ids[token, k]. A rank without any of them gets nothing. ids of -1 name no
expert; expert e lives on rank e // LOCAL.

A thread has a token. For each rank it sends to, it claims a slot with
reserved[rank], which counts from 0, and calls send_row.

In NumPy, for each token and rank:
    mask = sum(1 << k for k in range(TOP_K) if ids[token, k] // LOCAL == rank)
    if mask: send_row(..., rank, slot, token, mask, my_rank)

Intrinsics:
    load_i32(address)
    atomic_add_relaxed_gpu_i32(address, n)
    send_row(params, dst_rank, slot, token, mask, my_rank)
    |, <<, for ... in range(...)
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [10, TOP_K], [N_RANKS], [N_RANKS, 10, 2] (of dst_rank: token and mask of each src_rank's rows)
IDS, RESERVED, RECEIVED = 0, 1, 2
N_RANKS, LOCAL, TOP_K, ROOM = 3, 4, 4, 10


@kernel
def send_rows(params, num_tokens, my_rank):
    ids, reserved = region(params, IDS, my_rank), region(params, RESERVED, my_rank)
    token = block_idx() * block_dim() + thread_idx()
    while token < num_tokens:
        # ---- your 8 lines ----
        pass
        # ----------------------
        token += grid_dim() * block_dim()


@device_fn
def send_row(params, dst_rank, slot, token, mask, my_rank):
    """Given: the row (here: its token number) and the mask go into a slot at dst_rank."""
    place = region(params, RECEIVED, dst_rank) + u64(8 * (my_rank * ROOM + slot))
    store_i32(place, 100 * (my_rank + 1) + token)
    store_i32(place + u64(4), mask)
'''

RANKS, LOCAL, TOP_K, ROOM = 3, 4, 4, 10
REGIONS = (
    Region("ids", (ROOM, TOP_K), axes=("token", "k")),
    Region("reserved", (RANKS,), axes=("dst_rank",)),
    Region("received", (RANKS, ROOM, 2), axes=("src_rank", "slot", "token or mask")),
)


def _world(name, ids, grid, threads):
    """ids[rank]: of each token."""
    ids = [np.array(of_rank, int).reshape(-1, TOP_K) for of_rank in ids]
    start = []
    for of_rank in ids:
        padded = np.pad(of_rank, ((0, ROOM - len(of_rank)), (0, 0)), constant_values=-1)
        start.append({"ids": padded, "reserved": np.zeros(RANKS)})
    tokens, expected = tuple(map(len, ids)), tuple(_sent(ids, _mask))
    name = f"{name}, {many(grid, 'block')} of {many(threads, 'thread')}"
    return World(name, REGIONS, tokens, tuple(start), expected, grid, threads, data=dict(ids=ids))


def _here(row, rank):
    return [k for k, e in enumerate(row) if e >= 0 and e // LOCAL == rank]


def _mask(row, rank):
    return sum(1 << k for k in _here(row, rank))


def _sent(ids, masks):
    """What the memory of all ranks holds if masks(row, rank) gives the masks that are sent: one, or a list."""
    out = [{"reserved": np.zeros(RANKS, int), "received": REGIONS[2].unwritten()} for _ in ids]
    for src, of_rank in enumerate(ids):
        for dst in range(RANKS):
            sent = []
            for token, row in enumerate(of_rank):
                made = masks(row, dst)
                made = made if isinstance(made, list) else [made] if made else []
                sent += [(100 * (src + 1) + token, mask) for mask in made]
            out[src]["reserved"][dst] = len(sent)
            sent = sorted(sent)[:ROOM]
            if sent:
                out[dst]["received"][src, : len(sent)] = sent
    return out


def worlds():
    """Several experts on one rank; empty slots and a rank without tokens; many tokens."""
    some = [[[0, 1, 4, 8], [5, 0, 6, 7], [9, 10, 11, 8]], [[3, 7, 2, 11], [4, 8, 0, 5]], [[1, 9, 0, 2]]]
    gaps = [[[0, -1, 1, -1], [-1, -1, -1, -1], [-1, 4, 8, 5]], [], [[11, -1, -1, 10], [7, 3, 6, -1]]]
    random = np.random.default_rng(1)
    ten = [[random.permutation(RANKS * LOCAL)[:TOP_K] for _ in range(10)] for _ in range(RANKS)]
    return (
        _world("several experts on a rank", some, 2, 1),
        _world("empty slots", gaps, 1, 4),
        _world("ten tokens a rank", ten, 2, 3),
    )


def canonical(memory, world):
    """The rows of each segment in the order of their tokens and masks."""
    out = []
    for m, expected in zip(memory, world.expected):
        rows = m["received"].copy()
        for src in range(RANKS):
            there = rows[src, :, 0] > 0
            n = int(there.sum() if there[: there.sum()].all() else (expected["received"][src, :, 0] > 0).sum())
            rows[src, :n] = sorted(rows[src, :n].tolist()) or rows[src, :0]
        out.append(m | {"received": rows})
    return tuple(out)


def _model(masks):
    return lambda w: [{"received": m["received"]} for m in _sent(w.data["ids"], masks)]


def _cause(f):
    if f.race_on("reserved") and f.says("scopes"):
        return "slots are claimed by threads of several blocks: cta is too narrow a scope."
    if f.race_on("reserved"):
        return "two threads read the same number and take the same slot: claim with an atomic."
    if f.race_on("received") and not f.uses("atomic"):
        return "two threads take the same slot: claim it with an atomic."
    if f.differs("reserved", "received") and not any(m["reserved"].any() for m in f.raw):
        return (
            "no slot is claimed: add 1 to reserved[dst_rank] for each row, and send it to the slot that the atomic "
            "returns."
        )
    if (f.differs("reserved", "received") or f.kind == "bounds") and (f.holds("reserved", 0)[1:] == 0).all():
        return "all ranks share one counter: each has its own, reserved[dst_rank]."
    if (
        f.differs("reserved", "received")
        and (f.holds("received", 0)[:, 0, 0] < 0).all()
        and (f.holds("received", 0)[:, 1:, 0] > 0).any()
    ):
        return "slot 0 stays empty: the atomic returns what was there before, which is the slot."
    if f.race_on("received"):
        return "two rows are written to the same slot: take each slot from the atomic."
    if f.kind == "bounds":
        return "a slot is outside the region: more rows are sent than there are tokens."
    if f.differs("reserved"):
        return "reserved[rank] must be the number of rows that were sent there."
    if f.differs("received"):
        return "a row or a mask is wrong: one row for each rank that has an expert of the token, with all its k."
    return None


PUZZLE = Puzzle(
    title="Send once per rank",
    line="a row travels once, with a mask of its experts",
    start=START,
    hints=(
        "Turn it round: not for each k its rank, but for each rank its k.",
        "For each rank begin with mask = 0, go over all k, and set bit k if the expert lives there. An id "
        "of -1 lives nowhere.",
        "Behind the loop over k: if mask is not 0, claim a slot with reserved + u64(4 * dst_rank), and "
        "send_row with it.",
    ),
    worlds=worlds,
    kernels=("send_rows",),
    canonical=canonical,
    mistakes=(
        (_model(lambda row, rank: 0), "nothing is sent yet."),
        (
            _model(lambda row, rank: [1 << k for k in _here(row, rank)]),
            "a token is sent once for each expert: gather all k of a rank into one mask first, then send.",
        ),
        (
            _model(lambda row, rank: [_mask(row, rank)] * len(_here(row, rank))),
            "a token is sent once for each expert: gather all k of a rank into one mask first, then send.",
        ),
        (
            _model(lambda row, rank: [_mask(row[: k + 1], rank) for k in _here(row, rank)]),
            "a token is sent again with each expert that is found: send behind the loop over k.",
        ),
        (
            _model(lambda row, rank: _mask(row, rank) & -_mask(row, rank)),
            "the mask has the first k alone: go on over all k.",
        ),
        (
            _model(lambda row, rank: 1 << max(_here(row, rank)) if _here(row, rank) else 0),
            "the mask has the last k alone: add a bit to those before, |= 1 << k.",
        ),
        (_model(lambda row, rank: sum(_here(row, rank))), "bit k of the mask is 1 << k, not k."),
        (
            _model(lambda row, rank: sum(1 << (row[k] % LOCAL) for k in _here(row, rank))),
            "the mask has a bit for each local expert: bit k is asked for, the place in ids[token].",
        ),
        (
            _model(lambda row, rank: [_mask(row, rank)]),
            "a rank without any of the token's experts gets a row, too: send if the mask is not 0.",
        ),
        (
            _model(lambda row, rank: sum(1 << k for k, e in enumerate(row) if e >= 0 and e % RANKS == rank)),
            "experts are not dealt out in turn: expert e lives on rank e // LOCAL.",
        ),
        (
            _model(lambda row, rank: sum(1 << k for k, e in enumerate(row) if e >= 0 and e // LOCAL <= rank)),
            "bits of another rank are in the mask: it begins at 0 for each rank.",
        ),
    ),
    cause=_cause,
)
