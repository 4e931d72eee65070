"""Exercises of lesson 8: the backward pass of a layer."""

import numpy as np

from epmoe.lessons.answers import Wrong, call
from epmoe.lessons.number_questions import Number

STUB = '''
import numpy as np


def backward(x, topk_ids, weights, matrix, grad_out):
    """Gradients with respect to x (tokens, hidden), weights (tokens, top_k), matrix (n_experts, hidden, hidden)."""
    ...
'''

WARM_UP = Number(
    4,
    "dispatch and combine forwards, and the gradient of each backwards.",
    (
        (2, "these are the two of the forward pass; gradients travel as well."),
        (3, "both dispatch and combine have a backward pass, and both send rows."),
        (1, "dispatch and combine are two, and both have a backward pass."),
        (6, "the gradients of the experts' matrices stay where the experts are."),
    ),
    "count dispatch, combine and the backward pass of each.",
)
_PAIRS = 4096 * 8 * 3 // 4
STRETCH = Number(
    _PAIRS * (7392 + 3 * 14336),
    "24,576 pairs leave a rank; one way of 7392 bytes and three of 14336.",
    (
        (_PAIRS * 4 * 14336, "the forward dispatch sends FP8."),
        (_PAIRS * (7392 + 14336), "this is the forward pass only."),
        (_PAIRS * (2 * 7392 + 2 * 14336), "gradients travel in bf16, on both ways back."),
        (4096 * 8 * (7392 + 3 * 14336), "a quarter of the pairs stays at home."),
        (4096 * 8 // 4 * (7392 + 3 * 14336), "a quarter stays at home, three quarters leave."),
        (4 * _PAIRS * (7392 + 3 * 14336), "this is what all four ranks send together."),
        (4096 * 3 / 4 * (7392 + 3 * 14336), "each token has 8 pairs."),
        (_PAIRS * (7392 + 3 * 14336) / 1e9, "the answer is in bytes."),
    ),
    "pairs that leave a rank, times the bytes of the four ways.",
)


def _cases():
    """[(x, topk_ids, weights, matrix, grad_out)], whole numbers."""
    rng = np.random.default_rng(8)
    out = []
    for tokens, experts, top_k, hidden, empty in (
        (1, 1, 1, 2, 0),
        (1, 2, 2, 2, 0),
        (5, 4, 2, 3, 0),
        (6, 5, 3, 4, 0.3),
        (0, 3, 2, 2, 0),
    ):
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
        ids[rng.random(ids.shape) < empty] = -1
        x = rng.integers(-3, 4, (tokens, hidden)).astype(float)
        weights = rng.integers(2, 6, (tokens, top_k)).astype(float)
        matrix = rng.integers(-3, 4, (experts, hidden, hidden)).astype(float)
        out.append((x, ids, weights, matrix, rng.integers(-3, 4, (tokens, hidden)).astype(float)))
    return out


def _loss(x, ids, weights, matrix, grad_out):
    total = 0.0
    for t, k in np.argwhere(ids >= 0):
        total += weights[t, k] * (x[t] @ matrix[ids[t, k]]) @ grad_out[t]
    return total


def differences(case, which):
    """The gradient of one argument by central differences; exact, since the loss is linear in it."""
    arguments = list(case)
    out = np.zeros_like(arguments[which])
    for place in np.ndindex(out.shape):
        moved = arguments[which].copy()
        moved[place] += 1
        above = _loss(*arguments[:which], moved, *arguments[which + 1 :])
        out[place] = above - _loss(*arguments)
    return out


def judge(answer):
    """What was right; raises Wrong."""
    cases = _cases()
    for case in cases:
        got = call(answer, "backward", *case)
        _one(case, got)
    return (
        f"all three gradients equal finite differences exactly in {len(cases)} layers, with -1 in place of experts and "
        "with no token at all."
    )


def _one(case, got):
    try:
        got = [np.asarray(part, float) for part in got]
    except (TypeError, ValueError):
        got = []
    if len(got) != 3:
        raise Wrong("backward must return three arrays: the gradients of x, weights and matrix")
    for which, name, part in zip((0, 2, 3), ("x", "weights", "matrix"), got):
        right = differences(case, which)
        if part.shape != right.shape:
            raise Wrong(f"the gradient of {name} has shape {part.shape}; it must be {right.shape}, like {name}")
        if not (part == right).all():
            place = tuple(int(i) for i in np.argwhere(part != right)[0])
            raise Wrong(
                f"the gradient of {name} is {part[place]:g} at {place}, and by finite differences {right[place]:g}. "
                f"{_why(name, part, *case)}"
            )


def _why(name, got, x, ids, weights, matrix, grad_out):
    """What the wrong gradient looks like."""

    def made(of_pair, skip_empty=True, add=True):
        out = np.zeros_like(got)
        for t, k in np.ndindex(ids.shape):
            e = ids[t, k]
            if e < 0 and skip_empty:
                continue
            place = {"x": t, "weights": (t, k), "matrix": e}[name]
            out[place] = out[place] * add + of_pair(t, k, e)
        return out

    right = {
        "x": lambda t, k, e: weights[t, k] * (grad_out[t] @ matrix[e].T),
        "weights": lambda t, k, e: (x[t] @ matrix[e]) @ grad_out[t],
        "matrix": lambda t, k, e: weights[t, k] * np.outer(x[t], grad_out[t]),
    }[name]
    wrong = {
        "x": (
            (lambda t, k, e: grad_out[t] @ matrix[e].T, "The router's weights are missing."),
            (
                lambda t, k, e: weights[t, k] * (grad_out[t] @ matrix[e]),
                "x @ M has the gradient grad @ M.T; here M is not transposed.",
            ),
        ),
        "weights": (
            (lambda t, k, e: x[t] @ grad_out[t], "It needs the expert's RESULT, not the token that it got."),
            (lambda t, k, e: weights[t, k] * right(t, k, e), "The weight itself is a factor too many."),
        ),
        "matrix": (
            (lambda t, k, e: np.outer(x[t], grad_out[t]), "The router's weights are missing."),
            (
                lambda t, k, e: right(t, k, e).T,
                "It is the transpose: x along the rows of the matrix, the gradient along its columns.",
            ),
            (lambda t, k, e: np.outer(x[t] @ matrix[e], grad_out[t]), "It needs the expert's input, not its result."),
        ),
    }[name]
    by_k = np.zeros_like(got)
    if name == "matrix":
        for k in range(ids.shape[1]):
            last = {ids[t, k]: right(t, k, ids[t, k]) for t in range(len(ids)) if ids[t, k] >= 0}
            for e, of_pair in last.items():
                by_k[e] += of_pair
    looks = (
        (np.zeros_like(got), "It is 0 everywhere."),
        (made(right, skip_empty=False), "-1 means no expert: nothing comes from it. matrix[-1] is the last expert."),
        (
            made(right, add=False),
            "A token has several experts, and an expert several tokens: their gradients must be ADDED, not "
            "overwritten (x[i] += with a repeated index adds once).",
        ),
        (
            by_k,
            "Several tokens have one expert as their k-th, and m[ids] += adds only the last of them: np.add.at adds all.",
        ),
        *((made(of_pair), says) for of_pair, says in wrong),
    )
    for value, says in looks:
        if (got == value).all():
            return says
    return "Follow one pair: token, expert, weight, gradient."
