"""Lesson 7: Skew: hot experts, capacity, balancing, replicas."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Lesson 6 assumed that all experts are equally likely. Routers are not like
# that. Some experts are hot, and the GPU that has them makes all others wait.
# This lesson measures skew, and tries the four remedies that are in use:
# dropping, an auxiliary loss, a bias, and replicas.
#
# ## A routing
#
# The project ships no dump of a trained model. So this lesson draws one: the
# popularity of experts follows Zipf's law, expert number r in the order of
# popularity is chosen in proportion to r**-s. With s = 0 all are alike, with
# s = 1 a few are hot. A token chooses top_k DIFFERENT experts: noise of a
# Gumbel distribution is added to the logarithms, and the largest top_k win.
#
# If you have a dump of your model, the lesson takes that:
# `epmoe lesson 7 --input FILE` reads what `epmoe routing FILE` reads.

import numpy as np
from epmoe.lessons.own_routing import INPUT, read

N_RANKS, N_EXPERTS, TOP_K, TOKENS = 4, 64, 4, 512


def zipf(s, seed=0):
    """int (N_RANKS * TOKENS, TOP_K): the expert ids of a whole batch."""
    rng = np.random.default_rng(seed)
    popularity = -s * np.log(np.arange(1, N_EXPERTS + 1))
    rng.shuffle(popularity)             # hot experts lie anywhere
    noise = rng.gumbel(size=(N_RANKS * TOKENS, N_EXPERTS))
    return np.argsort(-(popularity + noise), axis=1)[:, :TOP_K]


if INPUT:
    ids, N_EXPERTS = read(INPUT, N_RANKS)
    TOP_K = ids.shape[1]
    print(f"{INPUT}: {len(ids)} tokens, {N_EXPERTS} experts, top {TOP_K}")
else:
    ids = zipf(1.0)
    print("drawn by Zipf's law, s = 1")
N_LOCAL = N_EXPERTS // N_RANKS

# ## Two kinds of imbalance
#
# The load of an expert is its number of pairs. The load of a rank is the sum
# over its experts. All ranks wait for the busiest one, so what counts is the
# largest load over the mean load: the imbalance.
#
# Predict: How far above the mean is the hottest expert? Is the busiest of
# the 4 ranks as far above the mean of ranks?


def loads(ids):
    """int (N_EXPERTS): pairs of each expert; -1 means no expert."""
    return np.bincount(ids[ids >= 0], minlength=N_EXPERTS)


def imbalance(load):
    """The largest over the mean."""
    return load.max() / load.mean()


load = loads(ids)
of_ranks = load.reshape(N_RANKS, N_LOCAL).sum(axis=1)
print("hottest experts:", np.sort(load)[::-1][:6], " mean", load.mean())
print("ranks:          ", of_ranks, " mean", of_ranks.mean())
print(f"imbalance of experts {imbalance(load):.2f}, "
      f"of ranks {imbalance(of_ranks):.2f}")
assert imbalance(of_ranks) <= imbalance(load)

# Adding up the experts of a rank evens out the loads. The more ranks, the
# fewer experts on each, and the worse it becomes:

if not INPUT:
    for s in (0.0, 0.5, 1.0):
        load_s = loads(zipf(s))
        row = [imbalance(load_s.reshape(n, -1).sum(axis=1))
               for n in (2, 4, 8, 16, 32, 64)]
        print(f"s = {s}: 2, 4, ... 64 ranks:", *[f"{i:5.2f}" for i in row])
        assert all(a <= b for a, b in zip(row, row[1:]))

# A layer takes as long as its busiest rank. With an imbalance of 1.5 it takes
# 1.5 times as long, and the other GPUs wait.
#
# ## Remedy 1: drop
#
# Give every expert a capacity, and drop what exceeds it:
#
#   capacity = ceil(capacity factor x tokens x top_k / n_experts)
#
# A dropped pair adds nothing to its token. Buffers become small and their
# size is known, and no expert takes longer than its capacity allows.
#
# Predict: The capacity factor is 1.0, so there is room for exactly all pairs.
# How many per cent are dropped?


def dropped(load, factor):
    """The share of pairs beyond the capacity."""
    capacity = int(np.ceil(factor * load.sum() / len(load)))
    return np.maximum(load - capacity, 0).sum() / load.sum()


for factor in (1.0, 1.25, 1.5, 2.0, 4.0):
    print(f"factor {factor:4}: {dropped(load, factor):6.1%} are dropped,",
          f"{factor:4} x the mean must fit in memory")
assert dropped(load, 1.0) >= dropped(load, 2.0) >= dropped(load, 99.0) == 0

# Dropping changes what the model computes. Most models of today drop nothing
# ("dropless"), and the kernels of this project never drop. A router that
# wants to drop a pair writes -1 in its place:

import ml_dtypes
from epmoe import EPConfig, ExpertParallel, LocalWorld

cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8,
               max_tokens_per_rank=4)
x = [np.ones((4, 8), ml_dtypes.bfloat16)] * 2
few = [np.array([[0, 2], [0, -1], [-1, -1], [1, 0]])] * 2
with ExpertParallel(cfg, LocalWorld(2, seed=0)) as ep:
    d = ep.dispatch(x, few)
    print("rows that came:", [of_rank.n_rows for of_rank in d])
    out = ep.combine([of_rank.output_tokens for of_rank in d], d,
                     [np.ones((4, 2), np.float32)] * 2)
print("pairs that count for each token:", out[0][:, 0].astype(int))
assert out[0][:, 0].tolist() == [2, 1, 0, 2]

# Without dropping, recv_buf must hold the worst case (lesson 2), or the
# ranks must talk about sizes first.
#
# ## Remedy 2: an auxiliary loss
#
# In training the router can be pushed towards balance. The usual term is
#
#   loss = n_experts * sum over e of f[e] * p[e]
#
# f[e] is the share of pairs that went to e, a count without a gradient.
# p[e] is the mean probability that the router gave to e, and has one. The
# loss is 1 for perfect balance. Its gradient lowers the logits of hot
# experts. Here a router of biases alone learns from this loss:


def softmax(z):
    """Along the last axis."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def train(steps, rate, seed=1):
    """Imbalance of experts before and after this many steps."""
    rng = np.random.default_rng(seed)
    bias, seen = -1.0 * np.log(np.arange(1, N_EXPERTS + 1)), []
    for step in range(steps):
        logits = bias + rng.gumbel(size=(512, N_EXPERTS))
        chosen = np.argsort(-logits, axis=1)[:, :TOP_K]
        share = loads(chosen) / chosen.size
        seen.append(imbalance(share))
        p = softmax(np.broadcast_to(bias, (1, N_EXPERTS)))[0]
        # d loss / d bias, through the softmax
        bias -= rate * N_EXPERTS * p * (share - (share * p).sum())
    return seen


seen = train(150, rate=1.0)
print("imbalance of experts after 0, 50, 100, 149 steps:",
      *[f"{seen[i]:.2f}" for i in (0, 50, 100, 149)])
assert INPUT or seen[-1] < seen[0] / 2

# The price is a compromise: this gradient competes with the one that makes
# the model good.
#
# ## Remedy 3: a bias outside the loss
#
# DeepSeek-V3 adds a bias to the scores, for the CHOICE of experts only. After
# each step the bias of every overloaded expert goes down by a fixed amount,
# the others' go up. The weights of the chosen experts, and so all gradients,
# are computed without it.


def adjust(steps, rate, seed=1):
    """Imbalance of experts at each step."""
    rng = np.random.default_rng(seed)
    score = -1.0 * np.log(np.arange(1, N_EXPERTS + 1))
    bias, seen = np.zeros(N_EXPERTS), []
    for step in range(steps):
        noise = rng.gumbel(size=(512, N_EXPERTS))
        chosen = np.argsort(-(score + noise + bias), axis=1)[:, :TOP_K]
        load = loads(chosen)
        seen.append(imbalance(load))
        bias -= rate * np.sign(load - load.mean())
    return seen


seen = adjust(150, rate=0.04)
print("imbalance of experts after 0, 50, 100, 149 steps:",
      *[f"{seen[i]:.2f}" for i in (0, 50, 100, 149)])
assert INPUT or seen[-1] < seen[0] / 2

# ## Remedy 4: replicas
#
# In inference the router is fixed. What can change is where experts live.
# Spare memory holds copies of the hottest experts, and tokens are spread over
# the copies. First choose how many copies each expert gets: give the next
# place to the expert with the largest load per copy. Then assign ranks: the
# largest load per copy first, always to the rank that has the least load and
# a free place.


def with_replicas(load, spare, n_ranks):
    """(copies of each expert, load of each rank) with spare places."""
    copies = np.ones(len(load), int)
    for _ in range(spare):
        copies[np.argmax(load / copies)] += 1
    pieces = np.sort(np.repeat(load / copies, copies))[::-1]
    room = np.full(n_ranks, len(pieces) // n_ranks)
    of_rank = np.zeros(n_ranks)
    for piece in pieces:
        rank = np.argmin(np.where(room > 0, of_rank, np.inf))
        of_rank[rank] += piece
        room[rank] -= 1
    return copies, of_rank


print(f"as they were: {imbalance(of_ranks):.2f}")
for spare in (0, N_RANKS, 4 * N_RANKS):
    copies, placed = with_replicas(load, spare, N_RANKS)
    print(f"{spare:2} spare places, well assigned: "
          f"{imbalance(placed):.3f}, most copies {copies.max()}")
    assert np.isclose(placed.sum(), load.sum())
    assert INPUT or imbalance(placed) <= imbalance(of_ranks)

# On 4 ranks a good order is worth more than copies. On 64 ranks, one expert
# each, only copies help:

if not INPUT:
    for spare in (0, 64, 128):
        placed = with_replicas(load, spare, 64)[1]
        print(f"64 ranks, {spare:3} spare places: {imbalance(placed):.2f}")

# Dispatch need not know about any of this. A replica is one more expert with
# an id of its own, and a table turns the router's ids into these:

physical = EPConfig(n_ranks=2, n_experts=6, top_k=2, hidden=8,
                    max_tokens_per_rank=4)
COPIES = {0: (0, 3), 1: (1,), 2: (2, 4), 3: (5,)}   # logical: physical ids
LOGICAL = {p: e for e, copies in COPIES.items() for p in copies}
logical = [np.array([[0, 2], [1, 0], [2, 3], [0, 3]])] * 2
spread = [np.array([[COPIES[e][t % len(COPIES[e])] for e in token]
                    for t, token in enumerate(of_rank)])
          for of_rank in logical]


def layer(cfg, ids, which):
    """The layer's result; expert e multiplies by which(e) + 1."""
    with ExpertParallel(cfg, LocalWorld(2, seed=0)) as ep:
        d = ep.dispatch(x, ids)
        y, n_local = [], cfg.n_experts // cfg.n_ranks
        for rank, of_rank in enumerate(d):
            r = of_rank.trimmed().numpy()
            mine = range(rank * n_local, (rank + 1) * n_local)
            factor = np.repeat([which(e) + 1 for e in mine],
                               np.diff(r.row_offsets))[:, None]
            rows = np.zeros(of_rank.output_tokens.shape, ml_dtypes.bfloat16)
            rows[:len(factor)] = r.output_tokens.astype(np.float32) * factor
            y.append(rows)
        return ep.combine(y, d, [np.full((4, 2), .5, np.float32)] * 2)


once = layer(cfg, logical, lambda e: e)
twice = layer(physical, spread, LOGICAL.get)
assert all((a == b).all() for a, b in zip(once, twice))
print("with and without replicas:", twice[0][:, 0])

# ## Worked problems
#
# 1. 4 ranks have 1000, 1000, 1400 and 600 rows. A row costs 0.05 us of
#    computing. How long does the layer take, and how long on average is a GPU
#    idle?
#
# Answer: The busiest rank takes 70 us. The mean is 50 us, so a GPU is idle
# for 20 us, 29 % of the time. The imbalance is 1.4.

rows = np.array([1000, 1000, 1400, 600])
assert round(rows.max() * 0.05) == 70 and round(rows.mean() * 0.05) == 50
assert imbalance(rows) == 1.4

# 2. 8 experts have the loads 50, 10, 10, 10, 5, 5, 5, 5. The capacity factor
#    is 1.2. How many of the 100 pairs are dropped?
#
# Answer: The capacity is ceil(1.2 x 100 / 8) = 15. Only the first expert is
# above it, and loses 35 pairs: 35 %.

eight = np.array([50, 10, 10, 10, 5, 5, 5, 5])
assert round(100 * dropped(eight, 1.2)) == 35

# 3. All tokens choose the same 8 of 256 experts, on 8 ranks. What are the
#    imbalance of experts and of ranks, at worst?
#
# Answer: 8 experts share what 256 should: 32. If all 8 live on one rank, that
# rank has all pairs, 8 times the mean.

assert 256 / 8 == 32

# 4. What is the auxiliary loss if one of 64 experts gets all the probability
#    and top_k = 1? And if all are alike?
#
# Answer: 64 x 1 x 1 = 64. If all are alike it is 64 x 64 x (1/64) x (1/64) =
# 1, which is the least it can be while f follows p.

assert 64 * 64 * (1 / 64) ** 2 == 1

# ## Exercises
#
# WARM-UP. 1024 tokens of top_k = 8, 64 experts, capacity factor 1.25. How
# many pairs may an expert have? Set WARM_UP.
#
# CORE. Write the router's part of dropping:
#
#   drop(topk_ids, n_experts, capacity)
#
# topk_ids is an integer array (tokens, top_k); -1 means no expert. Return a
# new array of the same shape in which every expert keeps at most `capacity`
# pairs, the FIRST tokens' pairs, and all others are -1. A pair that stays
# keeps its k.
#
# STRETCH. 4 experts have the loads 80, 20, 20 and 20. There are 2 ranks with
# 3 places each, so two places are spare. A copy takes an equal share of its
# expert's load. What is the least possible load of the busier rank? Set
# STRETCH.
