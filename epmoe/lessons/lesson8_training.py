"""Lesson 8: Training: the gradient of dispatch is combine."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# Training runs the layer forwards, and then backwards: from the gradient of
# the output to the gradients of tokens, weights and experts. The tokens are
# on other ranks than the experts, so gradients travel too. This lesson shows
# that no new kernel is needed for that.
#
# ## Dispatch is a matrix
#
# Forget bytes and ranks for a moment. Dispatch copies rows: row r of the
# result is token t of the input. That is a matrix of zeros and ones, D, with
# one line for each (token, k) pair. Combine adds rows up: the matrix has
# one line for each token. Here both are written down for 3 tokens with
# top_k = 2.

import numpy as np

N_EXPERTS, TOP_K, HIDDEN = 4, 2, 3
ids = np.array([[2, 0], [1, 2], [0, 3]])
TOKENS = len(ids)

order = np.argsort(ids.reshape(-1), kind="stable")  # pairs, by expert
token_of = order // TOP_K                           # row r is of this token
D = np.zeros((len(order), TOKENS), int)             # dispatch
D[np.arange(len(order)), token_of] = 1
C = np.zeros((TOKENS, len(order)), int)             # combine, weights of 1
for row, token in enumerate(token_of):
    C[token, row] += 1
print("D, dispatch:")
print(D)

# Predict: What does C, the matrix of combine, look like beside D?

print("C, combine with weights of 1:")
print(C)
assert (C == D.T).all()

# Each is the other's transpose. Now the chain rule: if rows = D x, and the
# loss has the gradient g with respect to the rows, then its gradient with
# respect to x is D^T g. So:
#
#   backward of dispatch = combine of the gradients, with weights of 1
#   backward of combine  = dispatch of the gradients, times the weights
#
# A token that went to two experts gets the sum of two gradients. That is the
# sum which combine makes anyway.
#
# ## The whole layer, and a check that is exact
#
# To believe it, one computes derivatives in another way: change one number
# by h, and see how much the loss changes. The central difference
#
#   (loss(z + h) - loss(z - h)) / 2h
#
# is exact for polynomials of degree 2 at most. With whole numbers and h = 1
# there is no rounding either. So the check below demands ==.
#
# An expert is a matrix, rows @ MATRIX[e]; the loss is half the sum of the
# squared outputs. In x alone this is a polynomial of degree 2, in the weights
# alone too, and in one matrix alone as well.

rng = np.random.default_rng(8)
x = rng.integers(-3, 4, (TOKENS, HIDDEN)).astype(float)
weights = rng.integers(1, 4, (TOKENS, TOP_K)).astype(float)
MATRIX = rng.integers(-2, 3, (N_EXPERTS, HIDDEN, HIDDEN)).astype(float)


def forward(x, weights, matrix):
    """(rows that the experts get, their results, the layer's output)."""
    rows = x[token_of]                                  # dispatch: D x
    y = np.stack([r @ matrix[e]
                  for r, e in zip(rows, ids.reshape(-1)[order])])
    out = np.zeros_like(x)
    for row, pair in enumerate(order):                  # combine
        out[pair // TOP_K] += weights.reshape(-1)[pair] * y[row]
    return rows, y, out


def loss(x, weights, matrix):
    """A number."""
    return (forward(x, weights, matrix)[2] ** 2).sum() / 2


def backward(x, weights, matrix):
    """Gradients of the loss: like x, like weights, like matrix."""
    rows, y, out = forward(x, weights, matrix)
    grad_out = out                                  # of half the squares
    came = grad_out[token_of]                           # a DISPATCH
    w = weights.reshape(-1)[order]
    grad_weights = np.zeros_like(weights)
    grad_weights.reshape(-1)[order] = (came * y).sum(axis=1)
    grad_y = w[:, None] * came
    grad_matrix, grad_rows = np.zeros_like(matrix), np.zeros_like(rows)
    for row, e in enumerate(ids.reshape(-1)[order]):    # the expert's own
        grad_matrix[e] += np.outer(rows[row], grad_y[row])
        grad_rows[row] = matrix[e] @ grad_y[row]
    grad_x = np.zeros_like(x)
    np.add.at(grad_x, token_of, grad_rows)              # a COMBINE
    return grad_x, grad_weights, grad_matrix


def differences(which):
    """The gradient of one argument by central differences with h = 1."""
    arguments = [x, weights, MATRIX]
    out = np.zeros_like(arguments[which])
    for place in np.ndindex(out.shape):
        at = []
        for h in (1, -1):
            moved = [a.copy() for a in arguments]
            moved[which][place] += h
            at.append(loss(*moved))
        out[place] = (at[0] - at[1]) / 2
    return out


for which, name in enumerate(("x", "weights", "experts")):
    gradient = backward(x, weights, MATRIX)[which]
    assert (gradient == differences(which)).all()
    print(f"gradient of {name}: equal to the bit")

# Look at grad_weights: it is a product of two rows, the gradient that came
# and the expert's RESULT. So either the results are kept until the backward
# pass, or the weights are applied on the experts' rank.
#
# The router's choice of experts has no gradient; the weights have one, and
# through it the router learns.
#
# ## The same with the kernels
#
# fused_dispatch and fused_combine are the project's functions for training:
# a token goes once to each rank, with its weights ("probs"). Their backward
# functions are the two sentences from above. First the forward pass, on two
# virtual ranks:

import ml_dtypes
from epmoe_ref.fused_a2a import (combine_backward, combine_forward,
                                 dispatch_backward, dispatch_forward)

BF16 = ml_dtypes.bfloat16
xs = [rng.integers(-3, 4, (n, 8)).astype(BF16) for n in (3, 2)]
topk = [np.array([[0, 2], [1, 0], [3, 1]]), np.array([[2, 3], [1, 2]])]
probs = [np.full(i.shape, 0.5, np.float32) for i in topk]
rows, _, _, _, handle = dispatch_forward(xs, topk, probs, N_EXPERTS)
print("rows a rank has received:", [len(r) for r in rows])

# The handle remembers which row is of which token. The backward pass needs
# no routing of its own: it sends along the same paths, so it is cheaper
# than the forward pass.
#
# Predict: A token travels once to each rank that has one of its experts, and
# each rank sends back one gradient for that row, here 1. Token 0 of rank 0
# has experts 0 and 2, on two ranks. Token 1 has experts 1 and 0, both on rank
# 0. What do the two tokens get?

ones = [np.ones(r.shape, BF16) for r in rows]
grad_x, _ = dispatch_backward(handle, ones, None)
print("gradients of rank 0's tokens:", grad_x[0][:, 0])
assert grad_x[0][:2, 0].tolist() == [2, 1]
assert all((a == b).all()
           for a, b in zip(grad_x, combine_forward(ones, handle)))
print("dispatch_backward is combine_forward, byte for byte")

grads = [np.arange(g.size, dtype=np.float32).reshape(g.shape).astype(BF16)
         for g in xs]
again = dispatch_forward(grads, topk, probs, N_EXPERTS)[0]
assert all((a == b).all()
           for a, b in zip(combine_backward(handle, grads), again))
print("combine_backward is dispatch_forward, byte for byte")

# And on the kernels, through the simulator, with the rows of the same handle:

from epmoe import LocalWorld
from epmoe.fused_a2a import fused_combine, fused_dispatch

world = LocalWorld(2, seed=0)
got_rows, _, _, _, got_handle = fused_dispatch(xs, topk, probs, N_EXPERTS,
                                               world)
assert all((np.asarray(a) == b).all() for a, b in zip(got_rows, rows))
summed, _ = fused_combine([np.asarray(r) for r in got_rows], world,
                          got_handle)
assert all((np.asarray(a) == b).all()
           for a, b in zip(summed, combine_forward(rows, handle)))
print("the kernels give the same bytes")

# In torch all of this is one line: epmoe.torch has these functions with their
# gradients, and loss.backward() does the rest (docs/torch.md).
#
# ## Where exactness ends
#
# Above, all numbers were small and whole. With real ones, sums are rounded,
# and the order of additions matters. The specification fixes the order (by
# rank, in float32, one rounding at the end), so gradients are the same in
# every run, on the CPU and on any GPU. Code that adds rows in the order in
# which they arrive, by atomic additions for instance, has gradients that
# differ from run to run in the last bits:

parts = rng.standard_normal((8, 20_000)).astype(np.float32)
shuffled = parts[rng.permutation(8)]
one, other = np.zeros((2, 20_000), np.float32)
for a, b in zip(parts, shuffled):
    one, other = one + a, other + b
print(f"{np.mean(one != other):.0%} of sums change with the order")
assert 0.1 < np.mean(one != other) < 0.9

# ## Worked problems
#
# 1. D is the matrix of a dispatch with 128 tokens and top_k = 8. How many
#    ones does it have? How many are in each column?
#
# Answer: One in each line: 1024 in all. A column belongs to a token, and has
# 8.

assert 128 * 8 == 1024 and (D.sum(axis=0) == TOP_K).all()

# 2. What is C D, with weights of 1 and no experts in between? What happens to
#    a token that is dispatched and combined?
#
# Answer: D^T D counts each token's pairs: 8 times the unit matrix. The token
# comes back 8 times as large. With weights that sum to 1 it comes back as it
# was.

assert (C @ D == TOP_K * np.eye(TOKENS)).all()

# 3. An expert got 100 rows of 7168 numbers, and is one matrix of 7168 x 2048.
#    How many multiplications does it need forwards, and how many backwards?
#
# Answer: Forwards 100 x 7168 x 2048 = 1.47 billion. Backwards twice as many:
# one product for the gradient of the rows, one for the gradient of the matrix.

assert round(100 * 7168 * 2048 / 1e9, 2) == 1.47

# 4. Rows of bf16 need 14336 bytes each, and rank 0 received 1024 of them. How
#    much must be kept for the backward pass of 58 layers, if the rows are
#    kept and not sent again?
#
# Answer: 1024 x 14336 x 58 = 851 MB. With 4096 tokens in place of 128 it is
# 27 GB, so large models send them again.

assert round(1024 * 14336 * 58 / 1e6) == 851

# ## Exercises
#
# WARM-UP. How many times does one Mixture-of-Experts layer move rows between
# the ranks in one training step, forward and backward together? Set WARM_UP.
#
# CORE. Write the backward pass of a layer with linear experts, in NumPy:
#
#   backward(x, topk_ids, weights, matrix, grad_out)
#
# x (tokens, hidden), topk_ids (tokens, top_k) with -1 for no expert,
# weights (tokens, top_k), matrix (n_experts, hidden, hidden). The layer is
#
#   out[t] = sum over k of weights[t, k] * (x[t] @ matrix[topk_ids[t, k]])
#
# without the -1. grad_out (tokens, hidden) is the gradient of the
# loss with respect to out. Return the gradients with respect to x, weights
# and matrix, as three arrays. The weight of a -1 has the gradient 0. The
# judge compares with finite differences, exactly.
#
# STRETCH. 4 ranks, 4096 tokens each, top 8, 7168 columns, every expert
# equally likely, pairs. The forward dispatch sends FP8 (7392 bytes a row),
# the other three ways send bf16 (14336 bytes). How many bytes leave a rank in
# one training step, on average? Set STRETCH.
