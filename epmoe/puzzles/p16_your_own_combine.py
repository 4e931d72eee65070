"""Puzzle 16: a whole combine."""

import re

import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.own_implementation import own_combine
from epmoe.puzzles.own_kernels import (
    BF16,
    NOT_ACQ_REL,
    arrivals,
    described,
    more_of,
    only_these_missing,
    routing,
    unfenced,
)
from epmoe.puzzles.p10_weighted_sum import weighted_sum
from epmoe.puzzles.world import NOT_YET, Region, World

START = '''"""Puzzle 16: your own combine.

The way back, for any number of ranks and experts: two kernels, launched one
after the other on each rank.

    send_back   a block takes a segment: all rows of one (local expert,
                src_rank). Its warps return the rows, then one thread signals
                their number to src_rank (puzzle 9).
    reduce      wait for all signals, one for each expert; each block waits by
                itself (puzzle 5). Sum the rows of each token (puzzle 10). The
                last block resets recv_count and done (puzzle 11).

It is judged like puzzle 15: many schedules, `epmoe check`, each of your
synchronisations broken in turn, and your TESTS.

In NumPy: epmoe_ref.combine.

Intrinsics: as in the puzzles named above; i32(...) and u64(...) convert.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# Your tests: [((tokens of rank 0, tokens of rank 1), rounds), ...]
TESTS = [((1, 0), 1)]

ROWS, SRC_INFO, BEGINS = 0, 1, 2    # bf16 [rows, hidden], int32 [rows, 2], int32 [local * n_ranks + 1]
IDS, WEIGHTS = 3, 4                 # int32 [T, top_k], float32 [T, top_k]
RETURNED, RECV_COUNT = 5, 6         # bf16 [T, top_k, hidden], uint64 [n_experts], NOT_YET
COMBINED, DONE = 7, 8               # bf16 [T, hidden]; int32 [1], 0 before and after
NOT_YET = (1 << 64) - 1


def combine_kernels(n_ranks, n_experts, top_k, hidden, slots):
    """The kernels send_back and reduce."""
    local, row_bytes, pairs = n_experts // n_ranks, 2 * hidden, hidden // 2

    @device_fn
    def send_segment(params, first, end, src_rank, word, my_rank):
        """All threads of a block: rows first to end - 1 go to src_rank, then their number into `word`."""
        row = first + warp_id()
        # ---- your 6 lines, with return_row(params, row, src_rank, my_rank) ----

        # ----------------------

    @device_fn
    def wait_for_all(recv_count):
        """All threads of a block: go on when the signals of all experts have come, and see all rows."""
        i = thread_idx()
        # ---- your 5 lines ----
        pass
        # ----------------------

    @device_fn
    def sum_pair(ids, weights, returned, token, i):
        """One thread: numbers 2 * i and 2 * i + 1 of a token's sum, as a uint32."""
        low, high = f32(0.0), f32(0.0)
        # ---- your 7 lines; a row of `returned` has `pairs` pairs ----

        # ----------------------
        return pack_bf16x2(low, high)

    @device_fn
    def clean_up(params, my_rank):
        """All threads of every block, at their end: the last block resets everything."""
        recv_count, done = region(params, RECV_COUNT, my_rank), region(params, DONE, my_rank)
        # ---- your 5 lines ----
        pass
        # ----------------------

    @device_fn
    def return_row(params, row, src_rank, my_rank):
        """Given. All lanes of a warp: a row goes to its place [token, k] of src_rank."""
        info = region(params, SRC_INFO, my_rank) + u64(8 * row)
        place = load_i32(info) * top_k + load_i32(info + u64(4))
        src = region(params, ROWS, my_rank) + u64(row_bytes) * u64(row)
        dst = region(params, RETURNED, src_rank) + u64(row_bytes) * u64(place)
        at = 16 * lane_id()
        while at < row_bytes:
            a, b, c, d = load16(src + u64(at))
            store16(dst + u64(at), a, b, c, d)
            at += 16 * 32

    @kernel
    def send_back(params, num_tokens, my_rank):
        segment = block_idx()
        while segment < local * n_ranks:
            local_expert, src_rank = segment // n_ranks, segment % n_ranks
            begins = region(params, BEGINS, my_rank) + u64(4 * segment)
            expert = my_rank * local + local_expert
            word = region(params, RECV_COUNT, src_rank) + u64(8 * expert)
            send_segment(params, load_i32(begins), load_i32(begins + u64(4)), src_rank, word, my_rank)
            segment += grid_dim()

    @kernel
    def reduce(params, num_tokens, my_rank):
        wait_for_all(region(params, RECV_COUNT, my_rank))
        ids, weights = region(params, IDS, my_rank), region(params, WEIGHTS, my_rank)
        returned, combined = region(params, RETURNED, my_rank), region(params, COMBINED, my_rank)
        token = block_idx()
        while token < num_tokens:
            i = thread_idx()
            while i < pairs:
                word = sum_pair(ids, weights, returned, token, i)
                store_u32(combined + u64(4) * u64(token * pairs + i), word)
                i += block_dim()
            token += grid_dim()
        clean_up(params, my_rank)

    return send_back, reduce
'''


def regions(shape, tokens, rounds):
    """The regions for a shape; what a round overwrites of peers is there once for each round."""
    ranks, experts, top_k, hidden, slots = shape
    local, rows = experts // ranks, ranks * slots * min(top_k, experts // ranks)
    n = max(1, *tokens)
    return (
        Region("rows", (rows, hidden), BF16, ("row", "column")),
        Region("src_info", (rows, 2), axes=("row", "token or k")),
        Region("begins", (local * ranks + 1,), axes=("segment",)),
        Region("ids", (n, top_k), axes=("token", "k")),
        Region("weights", (n, top_k), np.float32, ("token", "k")),
        Region("returned", (rounds, n, top_k, hidden), BF16, ("round", "token", "k", "column"), True),
        Region("recv_count", (rounds, experts), np.uint64, ("round", "expert"), True),
        Region("combined", (rounds, n, hidden), BF16, ("round", "token", "column"), True),
        Region("done", (1,), axes=("word",)),
    )


def world(shape, tokens, rounds=2, *, ids=None, rows=None, infos=None, weights=None, grid=3, threads=64):
    """The world of a combine. shape: n_ranks, n_experts, top_k, hidden, slots; the others of each rank."""
    ranks, experts, top_k, hidden, slots = shape
    local = experts // ranks
    ids = [routing(r, n, top_k, experts) for r, n in enumerate(tokens)] if ids is None else ids
    if weights is None:
        weights = [np.where(i < 0, np.nan, 1.0 + (i + 1) % 3) for i in ids]
    back = [np.zeros((n, top_k, hidden), np.float32) for n in tokens]
    start, made = [], regions(shape, tokens, rounds)
    for rank in range(ranks):
        full = {r.name: r.unwritten() for r in made}
        came, begins = arrivals(ids, rank, local)
        for i, (src, t, k) in enumerate(came):
            full["src_info"][i] = infos[rank][i] if infos is not None else (t, k)
            t, k = full["src_info"][i]
            if rows is None:
                full["rows"][i] = 32 * (ids[src][t, k] + 1) + 4 * t + np.arange(hidden) % 4
            else:
                full["rows"][i] = rows[rank][i]
            back[src][t, k] = full["rows"][i]
        full["begins"][:] = begins
        full["ids"][: len(ids[rank])], full["weights"][: len(ids[rank])] = ids[rank], weights[rank]
        full["recv_count"][:], full["done"][:] = NOT_YET, 0
        names = ("rows", "src_info", "begins", "ids", "weights", "recv_count", "done")
        start.append({name: full[name] for name in names})
    expected = []
    for rank, n in enumerate(tokens):
        combined = made[7].unwritten()
        given = {"ids": ids[rank], "weights": np.float32(weights[rank]), "returned": back[rank]}
        combined[:, :n] = weighted_sum(given)
        expected.append({"combined": combined} | {k: start[rank][k] for k in ("recv_count", "done")})
    name, data = described(tokens, experts, rounds, grid, threads), dict(shape=shape, ids=ids)
    return World(name, made, tuple(tokens), tuple(start), tuple(expected), grid, threads, rounds, data=data)


def worlds():
    """Two ranks; several rounds; three ranks with empty slots; a rank without tokens."""
    return (
        world((2, 4, 2, 8, 4), (3, 2), 1, grid=2),
        world((2, 4, 2, 8, 5), (5, 3), threads=33),
        world((3, 6, 3, 16, 3), (2, 0, 3), grid=2, threads=8),
        world((2, 8, 3, 8, 2), (0, 2), threads=5, rounds=3),
    )


COMPARED = ("combined", "recv_count")
BACK = ("returned", "recv_count", "combined")

NOT_MET = "threads sum before their block has seen all signals: a syncthreads() is missing behind the wait."


def _sign(f):
    if f.differs("combined") and not f.uses("return_row"):
        return "nothing is sent back yet."
    if f.differs("combined") and not (np.nan_to_num(f.holds("combined").astype(float)) > 0).any():
        return "nothing is summed yet."
    if (
        f.differs("combined")
        and np.isnan(f.holds("combined").astype(float)).any()
        and not re.search(r">=|> *-1|!=|<", f.hole(2))
    ):
        return "empty slots take part in the sum: where ids[token, k] is -1 nothing is added."
    return None


def _cause(f):
    if f.waits_for("recv_count") and "ld_" in f.hole(1) and "syncthreads" not in f.hole(1):
        return NOT_MET
    if f.waits_for("recv_count") and _zeros_missing(f):
        return "a segment without rows sends no signal, and its receiver waits for ever."
    if f.waits_for("recv_count"):
        return "a signal is never sent, or is reset before all blocks have seen it."
    if f.kind == "hang":
        return "not all threads of a block come to syncthreads."
    if f.race_on("recv_count") and f.says("scopes"):
        return "the signal goes to another GPU: both sides need scope sys."
    if f.race_on("done") and f.says("scopes"):
        return "`done` is used by several blocks: cta is too narrow a scope."
    if f.race_on(*BACK) and unfenced(f.hole(0), "st_relaxed"):
        return "the signal is relaxed, and orders nothing: release it."
    if f.race_on(*BACK) and "syncthreads" not in f.hole(0):
        return (
            "a segment is signalled before all warps of the block have sent their rows: a syncthreads() is missing "
            "before the signal."
        )
    if f.race_on(*BACK) and not re.search("ld_", f.hole(1)):
        return "reduce does not wait for the rows."
    if f.race_on(*BACK) and unfenced(f.hole(1), "ld_relaxed"):
        return "the signal is seen by a relaxed load, which orders nothing: acquire it."
    if f.race_on(*BACK) and "syncthreads" not in f.hole(1):
        return NOT_MET
    if f.race_on("recv_count", "done") and unfenced(f.hole(3), NOT_ACQ_REL):
        return "`done` is not counted with acq_rel: the last block must acquire what the others release."
    if f.race_on(*BACK) and not re.search("block_dim|range", f.hole(1)):
        return (
            "some signals are not waited for: there may be more words than threads, so thread i polls the words i, i +"
            " block_dim(), ..."
        )
    if f.race_on("recv_count", "done"):
        return "words are reset while other blocks still use them: only the last block may."
    if f.race_on(*BACK):
        return (
            "the chain from the store of a row to its load is broken: each link releases, the next acquires."
            if re.search("n_experts|n_ranks", f.hole(1))
            else "a rank's results come from all experts: wait for n_experts signals, not for those of its own."
        )
    if f.kind == "bounds":
        return "an address is wrong: pair i of [token, k] is number (token * top_k + k) * pairs + i."
    if f.differs("recv_count"):
        return "recv_count is not reset to NOT_YET."
    if f.differs("done"):
        return "`done` is not reset to 0."
    if f.differs("combined"):
        return "a sum is wrong: weights[token, k] times returned[token, k], over all k with an expert."
    return None


PUZZLE = Puzzle(
    title="Your own combine",
    line="send back, wait, sum, clean up: judged like the project's own",
    start=START,
    hints=(
        "Each hole is a puzzle that you have solved: 9; 5; 10; 11.",
        "send_segment: `row` grows by n_warps(); the block meets behind the loop; thread 0 releases "
        "u64(end - first) into `word`, at system scope, also for 0 rows.",
        "wait_for_all: n_experts words, in steps of block_dim(); nothing is reset here. sum_pair: the "
        "pair is number (token * top_k + k) * pairs + i.",
        "clean_up: thread 0 counts the block in `done`; the last one resets n_experts words of NOT_YET, "
        "and done. Does the block have to meet before, as in puzzle 15? Who reads recv_count, and when? TESTS need two rounds, and tokens on both ranks.",
    ),
    worlds=worlds,
    make="combine_kernels",
    more=more_of(own_combine, world, COMPARED),
    sign=_sign,
    cause=_cause,
)


def _zeros_missing(f):
    """Whether just the signals of segments without rows are missing."""
    _, experts, *_ = f.world.data["shape"]
    counts = [[int((ids == e).sum()) for e in range(experts)] for ids in f.world.data["ids"]]
    return only_these_missing(f, counts)
