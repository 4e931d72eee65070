"""Puzzle 10: the weighted sum of combine, right to the bit."""

import ml_dtypes
import numpy as np

from epmoe.puzzles.judging import Puzzle
from epmoe.puzzles.world import Region, World, many
from epmoe_ref import fma_rn

START = '''"""Puzzle 10: a weighted sum.

Combine ends here. A token has TOP_K results, returned[token, k], each HIDDEN
bf16 numbers, and a weight for each. A uint32 holds two bf16 numbers, the one
with the lower index in its low half. A thread makes one uint32 of the output:
number i of the token's WORDS.

    out = 0; for k = 0, 1, ...:
        out = fma(weights[token, k], returned[token, k], out)

in float32, rounded to bf16 once, at the end. An empty slot, ids[token, k] < 0,
adds nothing; its weight and its result may be anything, NaN too.

In NumPy:
    for k in range(TOP_K):
        new = epmoe.fma_rn(weights[:, k, None], returned[:, k], out)
        out = np.where(ids[:, k, None] >= 0, new, out)
    out.astype(bfloat16)

Intrinsics:
    load_i32(address), load_f32(address), load_u32(address)
    store_u32(address, value)
    bf16_lo(word), bf16_hi(word)    the two numbers as float32
    fma_rn(a, b, c)                 a * b + c, rounded once
    pack_bf16x2(low, high)          two float32, rounded, as a uint32 (given)
Ids, weights and words take 4 bytes each.
"""

from epmoe.device import *
from epmoe.puzzles.given import region

# int32 [6, TOP_K], float32 [6, TOP_K], bf16 [6, TOP_K, HIDDEN], bf16 [6, HIDDEN]
IDS, WEIGHTS, RETURNED, OUT = 0, 1, 2, 3
TOP_K, HIDDEN, WORDS = 3, 8, 4


@kernel
def weighted_sum(params, num_tokens, my_rank):
    ids, weights = region(params, IDS, my_rank), region(params, WEIGHTS, my_rank)
    returned, out = region(params, RETURNED, my_rank), region(params, OUT, my_rank)
    token = block_idx()
    while token < num_tokens:
        i = thread_idx()
        while i < WORDS:
            low, high = f32(0.0), f32(0.0)
            # ---- your 7 lines ----

            # ----------------------
            store_u32(out + u64(4 * (token * WORDS + i)), pack_bf16x2(low, high))
            i += block_dim()
        token += grid_dim()
'''

ROOM, TOP_K, HIDDEN = 6, 3, 8
BF16 = ml_dtypes.bfloat16
AXES = ("token", "k", "column")
REGIONS = (
    Region("ids", (ROOM, TOP_K), axes=AXES),
    Region("weights", (ROOM, TOP_K), np.float32, AXES),
    Region("returned", (ROOM, TOP_K, HIDDEN), BF16, AXES),
    Region("out", (ROOM, HIDDEN), BF16, ("token", "column")),
)


def _world(name, ids, weights, returned, grid, threads):
    n = len(ids)
    data = dict(ids=ids, weights=weights.astype(np.float32), returned=returned.astype(BF16))
    start = {r.name: r.unwritten(data[r.name]) for r in REGIONS[:3]}
    name = f"{n} tokens, {name}, {many(grid, 'block')} of {many(threads, 'thread')}"
    return World(
        name, REGIONS, (n,), (start,), ({"out": REGIONS[3].unwritten(weighted_sum(data))},), grid, threads, data=data
    )


def weighted_sum(d, *, order=1, step=fma_rn, weights=lambda d: d["weights"], ids=lambda d: d["ids"], swap=False):
    """bf16 [tokens, hidden]: the sum of d, {"ids", "weights", "returned"}; other options put a mistake into it."""
    ids, weights, rows = ids(d), weights(d), d["returned"].astype(np.float32)
    n, top_k, hidden = rows.shape
    out = np.zeros((n, hidden), np.float32)
    for k in range(top_k)[::order]:
        with np.errstate(all="ignore"):
            new = step(weights[:, k, None], rows[:, k], out)
        out = np.where(ids[:, k, None] >= 0, new, out)
    out = out.astype(BF16)
    return out.reshape(n, -1, 2)[..., ::-1].reshape(n, hidden) if swap else out


def _model(**mistake):
    return lambda w: ({"out": REGIONS[3].unwritten(weighted_sum(w.data, **mistake))},)


def worlds():
    """Round numbers; numbers that show each rounding; empty slots with NaN."""
    t, k, c = np.indices((5, TOP_K, HIDDEN))
    easy = 2.0 + t + 4 * k + c
    random = np.random.default_rng(0)
    hard = random.normal(size=(5, TOP_K, HIDDEN)) * 2.0 ** random.integers(-6, 7, (5, TOP_K, HIDDEN))
    hard[:, 2] = -hard[:, 0]
    weights = np.abs(random.normal(size=(5, TOP_K)))
    weights[:, 2] = weights[:, 0]
    ids = np.arange(15).reshape(5, TOP_K)
    gaps, holes, nothing = ids.copy(), weights.copy(), hard.copy()
    for token, slot in ((0, 1), (1, 0), (2, 2), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)):
        gaps[token, slot], holes[token, slot], nothing[token, slot] = -1, np.nan, np.nan
    return (
        _world("round numbers", ids, np.array([[1, 2, 4], [2, 1, 8], [4, 2, 1], [1, 1, 2], [8, 4, 1]]), easy, 5, 4),
        _world("any numbers", ids, weights, hard, 2, 3),
        _world("empty slots", gaps, holes, nothing, 3, 8),
    )


def _bf16_step(w, x, out):
    return fma_rn(w, x, out).astype(BF16).astype(np.float32)


def _sign(f):
    if f.differs("out") and np.isnan(f.holds("out", 0)[: f.world.tokens[0]].astype(float)).any():
        return "empty slots take part: where ids[token, k] is -1 nothing is added, or NaN spoils the sum."
    return None


def _cause(f):
    if f.kind == "bounds":
        return "an address is outside the arrays: all numbers take 4 bytes, two bf16 too, and a row has WORDS words."
    if f.differs("out"):
        return (
            "the wrong numbers are added: word i of [token, k] is number (token * TOP_K + k) * WORDS + i, its halves "
            "go to low and high, and fma_rn(a, b, c) is a * b + c."
        )
    return None


PUZZLE = Puzzle(
    title="Weighted sum",
    line="combine's sum, in the order and with the roundings of the specification",
    start=START,
    hints=(
        "A loop over k from 0 to TOP_K - 1. First ask whether ids[token, k] is an expert.",
        "The word is number (token * TOP_K + k) * WORDS + i of `returned`; all three numbers take 4 bytes.",
        "low = fma_rn(weight, bf16_lo(word), low), and the same for high.",
    ),
    worlds=worlds,
    kernels=("weighted_sum",),
    mistakes=(
        (_model(step=lambda w, x, out: out), "nothing is added yet: every sum is 0."),
        (_model(order=-1), "the order is the wrong way round: k ascends, and float32 sums depend on the order."),
        (
            _model(step=lambda w, x, out: (w * x).astype(np.float32) + out),
            "the product is rounded, and the sum again: fma_rn(a, b, c) rounds once.",
        ),
        (_model(step=_bf16_step), "each step is rounded to bf16: keep the sum in float32, pack_bf16x2 rounds it once."),
        (_model(weights=lambda d: np.ones_like(d["weights"])), "the results are added without their weights."),
        (
            _model(ids=lambda d: np.zeros_like(d["ids"])),
            "empty slots take part: where ids[token, k] is -1 nothing is added, or NaN spoils the sum.",
        ),
        (
            _model(ids=lambda d: np.where(d["ids"] > 0, d["ids"], -1)),
            "expert 0 is left out: only an id below 0 is an empty slot.",
        ),
        (
            _model(ids=lambda d: np.where((d["ids"] < 0).cumsum(axis=1) > 0, -1, d["ids"]).astype(int)),
            "the sum ends at an empty slot: leave it out, and go on with the next k.",
        ),
        (_model(swap=True), "the two halves are swapped: bf16_lo belongs to low, bf16_hi to high."),
        (
            _model(step=lambda w, x, out: fma_rn(w, x, 0 * out)),
            "the sum begins anew with each k: the third argument of fma_rn is the sum so far.",
        ),
        (
            _model(weights=lambda d: np.repeat(d["weights"][:, :1], TOP_K, axis=1)),
            "every k gets the weight of k = 0: weights[token, k] is number token * TOP_K + k.",
        ),
        (
            _model(weights=lambda d: np.repeat(d["weights"][:1], len(d["weights"]), axis=0)),
            "every token gets the weights of token 0: weights[token, k] is number token * TOP_K + k.",
        ),
    ),
    sign=_sign,
    cause=_cause,
)
