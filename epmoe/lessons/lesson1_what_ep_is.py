"""Lesson 1: What expert parallelism is, in plain NumPy."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Some layers of a large language model are a Mixture of Experts: instead of
# one big network there are many small ones, the experts. A router picks a few
# of them for each token, and only those compute. This lesson builds a layer
# of this kind on one machine, then spreads it over two, and gets the same
# numbers. The rest of this course is about doing it fast.
#
# ## One layer on one machine
#
# The sizes fit on a screen: there are 4 experts, each token goes to top_k = 2
# of them, and a token is a vector of 3 numbers. Here an expert is a matrix.

import numpy as np

N_EXPERTS, TOP_K, HIDDEN = 4, 2, 3
rng = np.random.default_rng(1)
MATRIX = rng.integers(-3, 4, (N_EXPERTS, HIDDEN, HIDDEN)).astype(float)


def expert(e, rows):
    """Rows (n, HIDDEN) to results (n, HIDDEN)."""
    return rows @ MATRIX[e]


# There are five tokens. For each token the router has made two lists of
# length top_k: the ids of its experts, all different, and a weight for each.
# The position in these lists is called k. A token with fewer experts has the
# id -1 in the places that are left over; here no token has.

x = rng.integers(-9, 10, (5, HIDDEN)).astype(float)
topk_ids = np.array([[0, 2], [3, 2], [2, 1], [1, 3], [2, 0]])
weights = np.array([[.75, .25], [.5, .5], [.25, .75], [.5, .5], [.75, .25]])

# The output of a token is the weighted sum of its experts' results:


def moe_layer(x, topk_ids, weights):
    """Like x (tokens, HIDDEN); ids and weights are (tokens, TOP_K)."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for k in range(TOP_K):
            out[t] += weights[t, k] * expert(topk_ids[t, k], x[t])
    return out


expected = moe_layer(x, topk_ids, weights)
print(expected)

# ## Why one machine is not enough
#
# Take sizes like those of DeepSeek-V3: 256 experts in a layer, 58 such
# layers, tokens of 7168 numbers, and an expert of three matrices 7168 x 2048.

parameters = 58 * 256 * 3 * 7168 * 2048
print(f"{parameters / 1e9:.0f} billion parameters in the experts,")
print(f"{parameters / 1e9:.0f} GB at one byte each; an H200 has 141 GB")
assert parameters / 1e9 > 4 * 141

# So the experts are spread over several GPUs, the ranks. This is expert
# parallelism (EP). Tokens are spread too, because each rank runs the rest of
# the model for its own tokens. Here there are 2 ranks with 2 experts each.
# Rank 0 has the first three tokens, rank 1 the other two. The rank that has
# an expert is its owner. On its owner an expert has a local number,
# e % N_LOCAL.

N_RANKS = 2
N_LOCAL = N_EXPERTS // N_RANKS      # experts of each rank


def owner(e):
    """The rank of an expert, or of an array of them."""
    return e // N_LOCAL


x = [x[:3], x[3:]]
topk_ids = [topk_ids[:3], topk_ids[3:]]
weights = [weights[:3], weights[3:]]

# From here on everything is a list over ranks: x[0] has the tokens of rank 0.
#
# ## Who sends what to whom
#
# The unit that travels is a pair (token, k): token t of rank src must reach
# the owner of topk_ids[src][t, k].
#
# Predict: Five tokens go to two experts each. How many of the ten pairs will
# cross from one rank to the other?

traffic = np.zeros((N_RANKS, N_RANKS), int)
for src in range(N_RANKS):
    for e in topk_ids[src].flat:
        traffic[src, owner(e)] += 1
for src in range(N_RANKS):
    to_0, to_1 = traffic[src]
    print(f"rank {src} sends {to_0} pairs to rank 0 and {to_1} to rank 1")
print(f"{traffic[0, 1] + traffic[1, 0]} of {traffic.sum()} pairs cross")
assert traffic.sum() == 5 * TOP_K

# The amounts are unequal. They depend on the data, and change with every
# layer and every batch. No rank knows in advance what it will receive.
#
# ## Dispatch
#
# Sending the tokens to the experts is called dispatch. The receiving rank
# sorts its rows by local expert. Then an expert's work is ONE matrix product
# over neighbouring rows. The rows of an expert are sorted by the rank that
# sent them. The rows of one rank for one expert are a segment, and
# counts[local_expert, src_rank] is their number. src_info holds the origin
# of each row.


def dispatch(x, topk_ids):
    """Lists over ranks, (tokens, HIDDEN) and (tokens, TOP_K), to what
    each rank receives: rows, src_info, counts (N_LOCAL, N_RANKS), ends."""
    received = []
    for rank in range(N_RANKS):
        rows, src_info, ends = [], [], [0]
        counts = np.zeros((N_LOCAL, N_RANKS), int)
        for le in range(N_LOCAL):
            for src in range(N_RANKS):
                chosen = topk_ids[src] == rank * N_LOCAL + le
                for t, k in np.argwhere(chosen):
                    rows.append(x[src][t])
                    src_info.append((src, t, k))
                    counts[le, src] += 1
            ends.append(len(rows))
        received.append((np.array(rows), src_info, counts, ends))
    return received

# Predict: How many rows will each rank hold?

received = dispatch(x, topk_ids)
for rank, (rows, src_info, counts, ends) in enumerate(received):
    print(f"rank {rank} holds {len(rows)} rows")
    for le in range(N_LOCAL):
        for row in range(ends[le], ends[le + 1]):
            src, t, k = src_info[row]
            print(f"  row {row}: local expert {le}, from rank {src} "
                  f"token {t} k={k}: {rows[row]}")

# ## The experts
#
# Each expert takes its rows as one block. This is why they were sorted: each
# rank computes two products, no matter how many tokens arrived.

outputs = []
for rank, (rows, _, _, ends) in enumerate(received):
    y = np.empty_like(rows)
    for le in range(N_LOCAL):
        mine = slice(ends[le], ends[le + 1])
        y[mine] = expert(rank * N_LOCAL + le, rows[mine])
    outputs.append(y)

# ## Combine
#
# Now the results travel back. Every row returns to the pair (token, k) that
# it came from. The token's rank sums the results over k with the router's
# weights.


def combine(outputs, received, weights):
    """The experts' rows of each rank to (tokens, HIDDEN) of each rank."""
    out = [np.zeros((len(w), HIDDEN)) for w in weights]
    for y, (_, src_info, _, _) in zip(outputs, received):
        for row, (src, t, k) in zip(y, src_info):
            out[src][t] += weights[src][t, k] * row
    return out


out = combine(outputs, received, weights)
assert (np.concatenate(out) == expected).all()
print("the same numbers as on one machine:")
print(np.concatenate(out))

# (They are exactly the same only because these numbers are small. In general
# the order of the additions changes the last bit. The specification that this
# project follows fixes the order: k ascending.)
#
# ## What is left to do
#
# This program cheats: one process sees the memory of all ranks and does one
# thing after another. On real GPUs all ranks run dispatch at the same time. A
# rank sees only what its peers have written into its memory.
#
#   lesson 2   where a peer may write: messages and buffers
#   lesson 3   how thousands of threads share the places: counters
#   lesson 4   when a rank may read what was written: signals and order
#   lesson 5   when memory may be overwritten, and why programs hang
#   lesson 6   how fast it can be
#
# `epmoe explain` draws the same steps for a small world of three ranks.
#
# ## Worked problems
#
# 1. 4 ranks hold 128 tokens each, and every token goes to 8 experts. How many
#    pairs are there in all? How many does an expert get on average, if there
#    are 256?
#
# Answer: 4 x 128 x 8 = 4096 pairs. 4096 / 256 = 16 for each expert.

assert 4 * 128 * 8 == 4096 and 4096 // 256 == 16

# 2. counts = [[3, 2], [1, 4]]: two local experts, two src_ranks. At which
#    rows do the four segments begin?
#
# Answer: 0, 3, 5 and 6. The rows of (expert 0, rank 0) come first, then 2 of
# (expert 0, rank 1), then 1 and 4 of expert 1.

assert np.cumsum([0, 3, 2, 1]).tolist() == [0, 3, 5, 6]

# 3. Every expert is equally likely. Which share of a rank's pairs stays on
#    the rank if there are 4 ranks, and which if there are 64?
#
# Answer: The rank owns 1 of 4 shares of the experts, so 25 % stay. On 64
# ranks 1.6 % stay. Expert parallelism over many ranks is almost all traffic.

assert 1 / 4 == 0.25 and round(100 / 64, 1) == 1.6

# 4. The experts above have 654 billion parameters, one byte each. A GPU has
#    141 GB, and half of it is free for experts. The number of GPUs must
#    divide 256. How many are needed?
#
# Answer: 654 / 70.5 = 9.3, so 10 would do. The next number that divides 256
# is 16.

assert 9 < parameters / 70.5e9 < 10 and 256 % 10 and 256 % 16 == 0

# ## Exercises
#
# WARM-UP. 64 experts live on 8 ranks. Which rank owns expert 43? Set WARM_UP.
#
# CORE. Lesson 1's dispatch() appends to a list, so each row follows the one
# before. A GPU copies all rows at once, so it must know each row's place in
# advance. It knows the counts: counts[local_expert][src_rank] is the number
# of rows from each rank for each local expert (a NumPy array of integers,
# shape (n_local_experts, n_ranks)). Write two functions:
#
#   row_offsets(counts)      n_local_experts + 1 numbers. The rows of local
#                            expert e are row_offsets[e], ... up to, and not
#                            including, row_offsets[e + 1].
#   first_row(counts, local_expert, src_rank)
#                            the first row that comes from src_rank for this
#                            expert.
#
# Rows are sorted as above: by local expert, then by src_rank.
#
# STRETCH. 8 experts live on 4 ranks, and a token goes to 2 different experts,
# every two equally likely. How many different ranks does it visit on average?
# Set STRETCH, to 3 digits at least.
