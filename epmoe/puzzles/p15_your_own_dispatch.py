"""Puzzle 15: a whole dispatch."""

import re

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.own_implementation import own_dispatch
from epmoe.puzzles.own_kernels import (
    BF16,
    NOT_ACQ_REL,
    arrivals,
    described,
    more_of,
    only_these_missing,
    routing,
    unfenced,
    values,
)
from epmoe.puzzles.world import NOT_YET, Region, World

START = '''"""Puzzle 15: your own dispatch.

Everything together, for any number of ranks and experts: two kernels, launched
one after the other on each rank.

    send      for each (token, k): claim a slot at the expert's rank, write the
              message, count it (puzzles 2 and 3). For each expert: wait for
              its messages, then signal the count to its rank (puzzle 4).
    receive   wait for all signals (puzzle 5; here each block waits by itself).
              Copy messages to rows, grouped by expert (puzzle 8, given). The
              last block resets reserved, finished, done and recv_count
              (puzzle 11).

Your kernels are judged like the project's own:
  - in small worlds, on many schedules, under the race detector;
  - by `epmoe check`, against the reference, to the bit;
  - by breaking each of your synchronisations in turn. Each must be needed: if
    one can be lost or weakened, and nobody notices, take it out, or say on its
    line why it stays:  # kept: ...
  - and your TESTS, below: worlds in which results alone are compared, without
    the race detector. They must notice lost resets, and lost waits where
    results can show them.

In NumPy: epmoe_ref.dispatch.

Intrinsics: as in the puzzles named above; i32(...) and u64(...) convert.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# Your tests: [((tokens of rank 0, tokens of rank 1), rounds), ...]
TESTS = [((1, 0), 1)]

TOKENS, IDS = 0, 1                      # bf16 [T, hidden], int32 [T, top_k]
RESERVED, FINISHED, DONE = 2, 3, 4      # int32 [n_experts], [n_experts], [1]; 0 before and after
RECV_BUF, RECV_COUNT = 5, 6             # messages and uint64, both of [local, n_ranks]; NOT_YET
ROWS, ROW_OFFSETS, SRC_INFO = 7, 8, 9   # bf16 [rows, hidden], int32 [local + 1], int32 [rows, 2]
NOT_YET = (1 << 64) - 1


def dispatch_kernels(n_ranks, n_experts, top_k, hidden, slots):
    """The kernels send and receive. slots: most tokens of a rank, places of a segment."""
    local, row_bytes = n_experts // n_ranks, 2 * hidden
    message_bytes = row_bytes + 16      # the row, then token and k

    @device_fn
    def send_pair(params, token, k, my_rank):
        """All lanes of a warp: one message, to the rank of its expert."""
        expert = load_i32(region(params, IDS, my_rank) + u64(4 * (token * top_k + k)))
        if expert < 0:
            return
        reserved = region(params, RESERVED, my_rank) + u64(4 * expert)
        finished = region(params, FINISHED, my_rank) + u64(4 * expert)
        # ---- your 7 lines: claim, write_message(params, expert, slot, token, k, my_rank), count ----
        pass
        # ----------------------

    @device_fn
    def signal(params, expert, count, my_rank):
        """One thread: `count` messages of this rank go to the expert; tell its rank when they are written."""
        finished = region(params, FINISHED, my_rank) + u64(4 * expert)
        words = region(params, RECV_COUNT, expert // local)
        # ---- your 3 lines ----
        pass
        # ----------------------

    @device_fn
    def wait_for_all(recv_count):
        """All threads of a block: go on when all signals have come, and see all messages."""
        i = thread_idx()
        # ---- your 5 lines ----
        pass
        # ----------------------

    @device_fn
    def clean_up(params, my_rank):
        """All threads of every block, at their end: the last block resets everything."""
        reserved, finished = region(params, RESERVED, my_rank), region(params, FINISHED, my_rank)
        recv_count, done = region(params, RECV_COUNT, my_rank), region(params, DONE, my_rank)
        # ---- your 9 lines ----
        pass
        # ----------------------

    @device_fn
    def copy_row(dst, src):
        """Given. All lanes of a warp: one row."""
        at = 16 * lane_id()
        while at < row_bytes:
            a, b, c, d = load16(src + u64(at))
            store16(dst + u64(at), a, b, c, d)
            at += 16 * 32

    @device_fn
    def write_message(params, expert, slot, token, k, my_rank):
        """Given. All lanes of a warp: the message of (token, k), into its slot."""
        place = ((expert % local) * n_ranks + my_rank) * slots + slot
        there = region(params, RECV_BUF, expert // local) + u64(message_bytes) * u64(place)
        row = region(params, TOKENS, my_rank) + u64(row_bytes) * u64(token)
        copy_row(there, row)
        if lane_id() == 0:
            store_i32(there + u64(row_bytes), token)
            store_i32(there + u64(row_bytes + 4), k)

    @device_fn
    def count_tokens(params, expert, num_tokens, my_rank):
        """Given. One thread: how many tokens of this rank go to the expert."""
        ids, count = region(params, IDS, my_rank), 0
        for i in range(num_tokens * top_k):
            if load_i32(ids + u64(4 * i)) == expert:
                count += 1
        return count

    @device_fn
    def copy_segment(params, segment, my_rank):
        """Given. A block: the messages of a segment become rows; the first of an expert says where it begins."""
        recv_count, row = region(params, RECV_COUNT, my_rank), 0
        for before in range(segment):
            row += i32(load_u64(recv_count + u64(8 * before)))
        count, offsets = i32(load_u64(recv_count + u64(8 * segment))), region(params, ROW_OFFSETS, my_rank)
        if thread_idx() == 0:
            if segment % n_ranks == 0:
                store_i32(offsets + u64(4 * (segment // n_ranks)), row)
            if segment == local * n_ranks - 1:
                store_i32(offsets + u64(4 * local), row + count)
        slot = warp_id()
        while slot < count:
            message = region(params, RECV_BUF, my_rank) + u64(message_bytes) * u64(segment * slots + slot)
            copy_row(region(params, ROWS, my_rank) + u64(row_bytes) * u64(row + slot), message)
            if lane_id() == 0:
                info = region(params, SRC_INFO, my_rank) + u64(8 * (row + slot))
                store_i32(info, load_i32(message + u64(row_bytes)))
                store_i32(info + u64(4), load_i32(message + u64(row_bytes + 4)))
            slot += n_warps()

    @kernel
    def send(params, num_tokens, my_rank):
        pair = block_idx() * n_warps() + warp_id()
        while pair < num_tokens * top_k:
            send_pair(params, pair // top_k, pair % top_k, my_rank)
            pair += grid_dim() * n_warps()
        expert = block_idx() * block_dim() + thread_idx()
        while expert < n_experts:
            signal(params, expert, count_tokens(params, expert, num_tokens, my_rank), my_rank)
            expert += grid_dim() * block_dim()

    @kernel
    def receive(params, num_tokens, my_rank):
        wait_for_all(region(params, RECV_COUNT, my_rank))
        segment = block_idx()
        while segment < local * n_ranks:
            copy_segment(params, segment, my_rank)
            segment += grid_dim()
        clean_up(params, my_rank)

    return send, receive
'''


def regions(shape, tokens, rounds):
    """The regions for a shape; what a round overwrites of peers is there once for each round."""
    ranks, experts, top_k, hidden, slots = shape
    local, rows = experts // ranks, ranks * slots * min(top_k, experts // ranks)
    n = max(1, *tokens)
    return (
        Region("tokens", (n, hidden), BF16, ("token", "column")),
        Region("ids", (n, top_k), axes=("token", "k")),
        Region("reserved", (experts,), axes=("expert",)),
        Region("finished", (experts,), axes=("expert",)),
        Region("done", (1,), axes=("word",)),
        Region(
            "recv_buf",
            (rounds, local, ranks, slots, 2 * hidden + 16),
            np.uint8,
            ("round", "local_expert", "src_rank", "slot", "byte"),
            True,
        ),
        Region("recv_count", (rounds, local, ranks), np.uint64, ("round", "local_expert", "src_rank"), True),
        Region("rows", (rounds, rows, hidden), BF16, ("round", "row", "column"), True),
        Region("row_offsets", (rounds, local + 1), axes=("round", "local_expert"), by_round=True),
        Region("src_info", (rounds, rows, 2), axes=("round", "row", "token or k"), by_round=True),
    )


def world(shape, tokens, rounds=2, *, ids=None, rows=None, grid=3, threads=64):
    """The world of a dispatch. shape: n_ranks, n_experts, top_k, hidden, slots. ids, rows: of each rank."""
    ranks, experts, top_k, hidden, slots = shape
    local = experts // ranks
    ids = [routing(r, n, top_k, experts) for r, n in enumerate(tokens)] if ids is None else ids
    rows = [values(r, n, hidden) for r, n in enumerate(tokens)] if rows is None else rows
    made = regions(shape, tokens, rounds)
    start, expected = [], []
    nothing = {
        "reserved": np.zeros(experts),
        "finished": np.zeros(experts),
        "done": np.zeros(1),
        "recv_count": np.full((rounds, local, ranks), NOT_YET, np.uint64),
    }
    for rank in range(ranks):
        full = {r.name: r.unwritten() for r in made}
        full["tokens"][: len(rows[rank])], full["ids"][: len(ids[rank])] = rows[rank], ids[rank]
        came, begins = arrivals(ids, rank, local)
        for i, (src, t, k) in enumerate(came):
            full["rows"][:, i], full["src_info"][:, i] = rows[src][t], (t, k)
        full["row_offsets"][:] = begins[::ranks]
        start.append({k: full[k] for k in ("tokens", "ids")} | nothing)
        expected.append({k: full[k] for k in ("row_offsets", "src_info", "rows")} | nothing)
    name, data = described(tokens, experts, rounds, grid, threads), dict(shape=shape, ids=ids)
    return World(name, made, tuple(tokens), tuple(start), tuple(expected), grid, threads, rounds, data=data)


def worlds():
    """Two ranks; three with empty slots; one rank without tokens; fewer threads than experts."""
    return (
        world((2, 4, 2, 8, 4), (3, 2), 1, grid=2),
        world((2, 4, 2, 8, 5), (5, 3), threads=33),
        world((3, 6, 3, 16, 3), (2, 0, 3), grid=2, threads=8),
        world((2, 8, 3, 8, 2), (0, 2), threads=5, rounds=3),
    )


def canonical(memory, world):
    """Rows of each segment in the order of token and k."""
    ranks, experts, *_ = world.data["shape"]
    local, out = experts // ranks, []
    for rank, m in enumerate(memory):
        rows, info = m["rows"].copy(), m["src_info"].copy()
        row = 0
        for e in range(rank * local, (rank + 1) * local):
            for ids in world.data["ids"]:
                n = int((ids == e).sum())
                for r in range(world.rounds):
                    part = slice(row, row + n)
                    order = np.lexsort((info[r, part, 1], info[r, part, 0]))
                    rows[r, part], info[r, part] = rows[r, part][order], info[r, part][order]
                row += n
        out.append(m | {"rows": rows, "src_info": info})
    return tuple(out)


COMPARED = ("rows", "row_offsets", "src_info", "recv_count")
TRAVELS = ("recv_buf", "recv_count", "rows", "src_info", "row_offsets")


def _cause(f):
    if not any(m["reserved"].any() or m["finished"].any() for m in f.raw) and not f.uses(r"write_message\("):
        return "nothing is sent yet."
    if f.uses(r"write_message\(") and "broadcast" not in f.hole(0) and (f.kind == "bounds" or f.differs(*TRAVELS)):
        return "only the lane that claims a slot knows it: warp_broadcast_i32(slot, 0) tells the others."
    if f.waits_for("finished"):
        return (
            "a count in `finished` is never reached: messages are not counted, or the counters of the round before "
            "were not reset."
        )
    if f.waits_for("recv_count") and _zeros_missing(f):
        return "an expert without tokens gets no signal."
    if f.waits_for("recv_count") and f.world.rounds == 1:
        return "a signal is never sent, or goes to the wrong place."
    if f.waits_for("recv_count"):
        return "a signal is never sent, or is reset before all blocks have seen it."
    return _race(f) or _memory(f)


def _race(f):
    if f.race_on("recv_count") and f.says("scopes"):
        return "the signal goes to another GPU: both sides need scope sys."
    if f.race_on("finished", "reserved", "done") and f.says("scopes"):
        return "a counter is used by several blocks: cta is too narrow a scope."
    if f.race_on(*TRAVELS) and "while" not in f.hole(1):
        return "a signal is sent before all messages are written: wait for `finished`."
    if f.race_on(*TRAVELS) and unfenced(f.hole(1), "ld_relaxed"):
        return "`finished` is read by a relaxed load, so the signal says nothing about the messages: acquire it."
    if f.race_on(*TRAVELS) and unfenced(f.hole(1), "st_relaxed"):
        return "the signal is relaxed, and orders nothing: release it."
    if f.race_on(*TRAVELS) and unfenced(f.hole(0), r"add_relaxed_\w+\(finished"):
        return "a message is counted by a relaxed addition, which orders nothing: release it."
    if f.race_on(*TRAVELS) and "syncwarp" not in f.hole(0):
        return "a message is counted before all lanes have written it: a syncwarp() is missing before the count."
    if f.race_on(*TRAVELS) and unfenced(f.hole(2), "ld_relaxed"):
        return "the signal is seen by a relaxed load, which orders nothing: acquire it."
    if f.race_on(*TRAVELS) and "syncthreads" not in f.hole(2):
        return "threads go on before their block has seen all signals: a syncthreads() is missing behind the wait."
    if f.race_on(*TRAVELS, "done") and "syncthreads" not in f.hole(3):
        return (
            "words are reset that other threads of the block still read: a syncthreads() is missing before the block "
            "is counted."
        )
    if f.race_on(*TRAVELS, "done", "reserved", "finished") and unfenced(f.hole(3), NOT_ACQ_REL):
        return "`done` is not counted with acq_rel: the last block must acquire what the others release."
    if f.race_on(*TRAVELS) and not re.search("block_dim|range", f.hole(2)):
        return (
            "some signals are not waited for: there may be more words than threads, so thread i polls the words i, i +"
            " block_dim(), ..."
        )
    if f.race_on("recv_count", "done", "reserved", "finished"):
        return "words are reset while other blocks still use them: only the last block may."
    if f.race_on(*TRAVELS):
        return "the chain from the store of a message to its load is broken: each link releases, the next acquires."
    return None


def _memory(f):
    if f.kind == "bounds" or f.differs("reserved", "finished") or f.race_on("reserved"):
        return (
            "`reserved` or `finished` is not right: one claim and one count for each message, and 0 after each round."
        )
    if f.differs("recv_count"):
        return "recv_count is not reset to NOT_YET."
    if f.differs("done"):
        return "`done` is not reset to 0."
    return None


PUZZLE = Puzzle(
    title="Your own dispatch",
    line="send, signal, wait, group, clean up: judged like the project's own",
    start=START,
    hints=(
        "Each hole is a puzzle that you have solved: 2 and 3; 4; 5; 11.",
        "send_pair: lane 0 claims, all lanes get the slot, all write, the warp meets, lane 0 counts. "
        "signal: its word is number expert % local * n_ranks + my_rank of `words`.",
        "wait_for_all: each thread polls its words, in steps of block_dim(), and the block meets behind "
        "the loop. No word is reset here: other blocks may still look at it.",
        "clean_up: the block meets, thread 0 counts it in `done`, and the last one resets n_experts "
        "words twice, local * n_ranks words of NOT_YET, and done. TESTS need two rounds, and tokens on "
        "both ranks.",
    ),
    worlds=worlds,
    make="dispatch_kernels",
    canonical=canonical,
    more=more_of(own_dispatch, world, COMPARED),
    cause=_cause,
)


def _zeros_missing(f):
    """Whether just the signals of experts without tokens are missing."""
    ranks, experts, *_ = f.world.data["shape"]
    counts = np.array([[(ids == e).sum() for ids in f.world.data["ids"]] for e in range(experts)])
    return only_these_missing(f, counts.reshape(ranks, experts // ranks, ranks))
