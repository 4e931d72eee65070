"""Lesson 6: Speed: bytes, floors, rows against pairs, measured times."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# How fast can dispatch be? Before measuring, we can say how fast it cannot
# be, because data needs time to cross the links. This lesson counts bytes,
# derives a lower bound from them, the floor, and compares it with
# measurements. Apart from the 359 GB/s in the worked problems, all measured
# figures come from the result files of the project's benchmarks.
#
# ## What crosses a link
#
# Take the sizes of lesson 1: 256 experts on 4 GPUs, 8 experts for each token,
# tokens of 7168 numbers. A seed draws a router that likes all experts
# equally.

from math import comb

import numpy as np
from epmoe import EPConfig
from epmoe.lessons import measured

N_RANKS, N_EXPERTS, TOP_K, HIDDEN = 4, 256, 8, 7168
N_LOCAL = N_EXPERTS // N_RANKS


def routing(tokens, seed=0):
    """Over ranks: int (tokens, TOP_K), distinct expert ids."""
    rng = np.random.default_rng(seed)
    return [np.argsort(rng.random((tokens, N_EXPERTS)), axis=1)[:, :TOP_K]
            for _ in range(N_RANKS)]


# pairs[src, dst] counts messages from rank to rank, one for each (token, k).


def pairs_matrix(topk_ids):
    """int (N_RANKS, N_RANKS)."""
    return np.array([[(ids // N_LOCAL == dst).sum()
                      for dst in range(N_RANKS)] for ids in topk_ids])

# Predict: How many of the 1024 pairs of a rank stay at home, about?

matrix = pairs_matrix(routing(128))
print(matrix)

# The diagonal stays on its rank. The rest crosses links. A GPU sends and
# receives at the same time. So the busiest direction of any GPU decides: the
# largest sum of a line or a column, without the diagonal.


def busiest(matrix):
    """The most tokens that one GPU sends, or receives."""
    others = matrix - np.diag(np.diag(matrix))
    return max(others.sum(axis=0).max(), others.sum(axis=1).max())


BF16 = 2
sent_bytes = busiest(matrix) * HIDDEN * BF16
print(f"busiest GPU: {busiest(matrix)} tokens, {sent_bytes / 1e6:.1f} MB")

# ## The floor
#
# The floor is bytes / bandwidth. The benchmarks measure the bandwidth in the
# same run, with a kernel that only stores to peers.

found = measured.newest()
if found is None:
    print("(no result files found: they are in the repository, in")
    print("benchmarks/results. A guess is used instead of a measurement.)")
gbps = found.link_gbps if found else 350.0
print(f"{gbps:.0f} GB/s,", "a guess" if not found else
      f"measured on {found.n_ranks} x {found.device}")
for tokens in (1, 128, 4096):
    b = busiest(pairs_matrix(routing(tokens))) * HIDDEN * BF16
    floor_us = b / gbps / 1e3
    print(f"{tokens:5} tokens a rank: {b / 1e6:8.2f} MB,",
          f"floor {floor_us:7.1f} us")

# (GB/s is bytes per nanosecond, so bytes / (GB/s) is nanoseconds; another
# 1000 make microseconds. G is 10**9 here, not 2**30.)
#
# No kernel that sends these bytes is faster than the floor, however clever.
# To get below it, a kernel must send less. There are two ways.
#
# ## Less: smaller numbers
#
# The payload can be quantised before it is sent: fewer bits for each number,
# and a scale for each group of numbers.

for name in ("bf16", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"):
    cfg = EPConfig(N_RANKS, N_EXPERTS, TOP_K, HIDDEN, 128,
                   token_format=name)
    size = cfg.format.token_size()
    part = size / (BF16 * HIDDEN)
    print(f"{name:14} {size:6} bytes a token, {part:.2f} of bf16")

# ## Less: a token once
#
# A token has 8 experts on 4 ranks. At least two of them share a rank, so the
# same payload goes to the same GPU more than once. The "rows" kernels send it
# once to each RANK, with the list of the token's experts there. The receiver
# makes the copies. How many ranks does a token visit? It misses a rank if all
# its k experts are elsewhere, with probability C(E - L, k) / C(E, k).
#
# Predict: 8 experts, 4 ranks, 256 experts in all. How many ranks does a token
# visit on average: 2, 3, 3.6 or 4?


def ranks_visited(n_ranks):
    """How many ranks a token visits, on average."""
    local = N_EXPERTS // n_ranks
    missed = comb(N_EXPERTS - local, TOP_K) / comb(N_EXPERTS, TOP_K)
    return n_ranks * (1 - missed)


def rows_matrix(topk_ids):
    """int (N_RANKS, N_RANKS): a token counts once for a rank."""
    return np.array([[(ids // N_LOCAL == dst).any(axis=1).sum()
                      for dst in range(N_RANKS)] for ids in topk_ids])


drawn = rows_matrix(routing(4096)).sum() / (N_RANKS * 4096)
expected = ranks_visited(N_RANKS)
print(f"ranks a token: {drawn:.3f} drawn, {expected:.3f} expected")
assert abs(drawn - expected) < 0.02
for n in (2, 4, 8, 16, 64):
    rows = ranks_visited(n)
    print(f"{n:3} ranks: a token makes {TOP_K} pairs or {rows:.2f} rows, "
          f"{TOP_K / rows:.2f} times less")
assert TOP_K / ranks_visited(2) > 3.9 and TOP_K / ranks_visited(64) < 1.1

# With few ranks this saves a lot, with many almost nothing. It has a price:
#
# - In combine the experts' rank must sum its rows of a token before it sends,
#   or nothing would be saved. Pairs send every row as it is.
# - These partial sums are rounded to bf16. This is one more rounding than in
#   pairs, where the token's rank sums all rows in float32.
# - There is more bookkeeping: the list of a row's experts must travel with
#   the row, and must be kept for combine.
#
# In dispatch nothing is summed, so pairs can save these bytes too, at no
# price. The fast kernels write the payload into the token's message to one of
# its experts on a rank. The messages to the other experts there say which
# message has it, as in lesson 2. In combine every expert sends its own row.
#
# How much does one rounding matter? Take a token with 8 rows, two on each of
# 4 ranks:

import ml_dtypes

rng = np.random.default_rng(0)
y = rng.standard_normal((4, 2, 100_000)).astype(ml_dtypes.bfloat16)
y = y.astype(np.float32)
at_once = y.sum(axis=(0, 1)).astype(ml_dtypes.bfloat16)
partial = y.sum(axis=1).astype(ml_dtypes.bfloat16).astype(np.float32)
in_two = partial.sum(axis=0).astype(ml_dtypes.bfloat16)
differ = np.mean(at_once != in_two)
print(f"{differ:.0%} of the sums differ in their last bits")
assert 0.05 < differ < 0.9

# ## What was measured
#
# Times are microseconds of the slowest GPU, and multiples of the floor for
# the bytes that the kernels send. "whole" are earlier fast kernels for pairs,
# which sent a payload in every message. "shared" are pairs that send it once
# to a rank. "grouped rows" (gr. rows) end, like pairs, with rows grouped by
# expert. NCCL is an all-to-all with permutation, in torch. All are times of
# the device; lesson 9 shows what a caller waits for, host included.


def times_and_floor(kernels, phase, tokens):
    """Microseconds, and in brackets the multiple of the floor."""
    row = found.row(kernels, phase, tokens)
    if row is None:
        return f"{'-':>16}"
    return f"{row['us']:8.1f} ({row['us'] / row['floor_us']:5.1f})"


OURS = ("pairs whole", "pairs fused", "expert-major")
if found:
    gpu = found.device.partition(",")[0]
    print(f"{found.n_ranks} x {gpu}, {found.date[:10]}")
    print(f"{'tokens':>6} {'':9}{'whole':>8} (x fl.) {'shared':>9} (x fl.)"
          f" {'gr. rows':>8} (x fl.) {'NCCL':>8}")
    for tokens in found.tokens("pairs whole", "dispatch"):
        for phase in ("dispatch", "combine"):
            nccl = found.row("nccl all-to-all", phase, tokens)
            print(f"{tokens:6} {phase:9}",
                  *(times_and_floor(k, phase, tokens) for k in OURS),
                  f"{nccl['us']:8.1f}" if nccl else f"{'-':>8}")

# The table shows two things. First, for large batches the kernels come close
# to their floor. Then only fewer bytes help.


def compared(phase, tokens, kernels, name):
    """Bytes and time of some kernels, relative to whole messages."""
    pairs = found.row("pairs whole", phase, tokens)
    other = found.row(kernels, phase, tokens)
    if pairs and other:
        print(f"{phase} of {tokens}: {name} send "
              f"{other['bytes'] / pairs['bytes']:.2f} of the bytes in "
              f"{other['us'] / pairs['us']:.2f} of the time")
        assert pairs["us"] < 2 * pairs["floor_us"]


if found:
    most = max(found.tokens("pairs whole", "dispatch"))
    compared("dispatch", most, "pairs fused", "shared payloads")
    compared("dispatch", most, "expert-major", "grouped rows")
    compared("combine", most, "expert-major", "grouped rows")

# Second, for small batches the floor says nothing.

if found:
    row = found.row("pairs whole", "dispatch", 1)
    if row:
        print(f"1 token: floor {row['floor_us']:.1f} us, "
              f"measured {row['us']:.1f} us")
        assert row["us"] > 5 * row["floor_us"]

# One token has almost no bytes. What remains is a chain of steps. Each waits
# for the one before: claim a slot, write, count, see the count, signal across
# the link, see the signal, sum the offsets, tell the other blocks, copy. Here
# kernels get faster by leaving out steps, not bytes.
#
# ## Where to go on
#
#   epmoe explain              a round of the real kernels, to step through
#   epmoe/kernels/plain/       the plain kernels, made for reading
#   epmoe_ref/                 the results that kernels must give, exactly
#   docs/checking.md           your own kernel under the race detector
#   benchmarks/notes/          what was tried to gain speed, and the outcome
#
# ## Worked problems
#
# 1. 8 ranks, 256 tokens each, top 8, 7168 columns of bf16, every expert
#    equally likely. What is the floor of pairs over links of 359 GB/s?
#
# Answer: 256 x 8 x 7/8 = 1792 messages leave each rank. 1792 x 14336 bytes =
# 25.7 MB, and 25.7 MB / 359 GB/s = 71.6 us.

assert round(256 * 8 * 7 / 8 * 14336 / 359e3, 1) == 71.6

# 2. What is the floor of rows in the same world?
#
# Answer: A token visits 5.3 of 8 ranks, 7/8 of these are elsewhere. 256 x
# 4.63 x 14336 bytes / 359 GB/s = 47.4 us.

assert round(ranks_visited(8) * 7 / 8, 2) == 4.63
assert abs(256 * ranks_visited(8) * 7 / 8 * 14336 / 359e3 - 47.4) < 0.1

# 3. fp8_blockwise has one byte a number and a scale of 4 bytes for 128
#    numbers. What does the floor of problem 1 become?
#
# Answer: 7168 + 4 x 56 = 7392 bytes, 0.516 of bf16. The floor becomes 36.9
# us.

assert 7168 + 4 * 56 == 7392
assert round(71.56 * 7392 / 14336, 1) == 36.9

# 4. A link carries 359 GB/s, and a store needs 1 us to arrive. How many rows
#    of 14336 bytes must be under way to keep the link busy?
#
# Answer: 359 GB/s x 1 us = 359 kB, 25 rows. A kernel that waits for each row
# has 1/25 of the speed.

assert round(359e9 * 1e-6 / 14336) == 25

# ## Exercises
#
# WARM-UP. 2 ranks, 64 tokens each, top 8, rows of 14336 bytes, every expert
# equally likely. How many bytes of pairs leave a rank for the other, on
# average? Set WARM_UP.
#
# CORE. Given a routing and a machine, which layout is faster? Write
#
#   decide(topk_ids, n_ranks, n_experts, row_bytes, link_gbps, extra_us)
#
# which returns three things: the floor of pairs in microseconds, the floor of
# rows in microseconds, and the faster layout, "pairs" or "rows".
#
#   topk_ids    list over ranks of integer arrays (tokens, top_k). The ranks
#               may have different numbers of tokens, also 0. -1 means no
#               expert, and nothing is sent for it.
#   row_bytes   bytes of one token, for both layouts
#   link_gbps   10**9 bytes a second that each GPU can send, and at the same
#               time receive
#   extra_us    the time that rows take beyond their floor, for the sums and
#               the bookkeeping. Pairs take their floor. If both times are
#               equal, return "pairs".
#
# A floor counts the busiest direction of any rank, in or out, as above. What
# a rank sends to itself crosses no link.
#
# STRETCH. 8 ranks, 256 experts, every choice of k experts equally likely.
# From which top_k on do rows send at most half the bytes of pairs? Set
# STRETCH.
