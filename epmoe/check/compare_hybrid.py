"""Comparison for HybridEP: a row for each (token, local expert), grouped by expert. The order of rows is fixed."""

from dataclasses import replace

import numpy as np

from epmoe.check.causes import best
from epmoe.check.compare import compare_combined, same_type
from epmoe.check.difference import Difference, as_array, bits, form, shown
from epmoe.check.seen_causes import of_rows, of_sums

RULES = {
    "dispatched_hidden": "rows by local expert, then src_rank, then token; zeros in padding",
    "dispatched_probs": "a row's prob is probs[token, its expert]; 0 in rows without a token",
    "dispatched_scaling_factor": "one float32 scale for 128 columns of a row; 0 in rows without a token",
    "tokens_per_expert": "rows of each local expert, padding included; what does not fit into num_permuted_tokens is "
    "dropped from the end and not counted",
    "overflow": "1 where the padded rows are more than num_permuted_tokens, else 0",
}
SUM = (
    "unweighted, in float32 from +0: on each rank over the token's experts ascending, rounded; then over the ranks "
    "of a p2p world ascending, rounded; then over the p2p worlds; +0 for a token without rows"
)
BACK = "combine's gradient is dispatch again: each row the bytes of the token it came from, zeros without a token"
PROBS_BACK = "grad_probs[t, e] is the gradient of the pair's row, a copy; 0 where no row is, dropped pairs included"


def received(routing_map, handle, rank, got, want):
    """Differences between one rank's dispatch and the reference's. got, want: {name: [rank]}. handle: of the latter."""
    found = []
    for name in ("tokens_per_expert", "overflow"):
        if got[name] is not None:
            found += _small(name, routing_map, handle, rank, as_array(got[name][rank]), want[name][rank])
    for name in ("dispatched_hidden", "dispatched_probs", "dispatched_scaling_factor"):
        a, b = None if got[name] is None else got[name][rank], want[name][rank]
        if (a is None) != (b is None):
            says = "is missing from the result" if a is None else "was given, where the reference has none"
            found.append(Difference(name, says, a, b, rank, rule=RULES[name]))
        elif b is not None:
            found += rows(name, handle, rank, a, b, RULES[name])
    return found


def _small(name, routing_map, handle, rank, got, want):
    is_flag = name == "overflow" and got.dtype.kind in "iub"
    if got.shape != want.shape or not (is_flag or same_type(got, want)):
        says = f"is {form(got)}, reference {form(want)}"
        return [Difference(name, says, got, want, rank, rule=RULES[name])]
    if (got == want).all():
        return []
    at = int(np.flatnonzero(got.reshape(-1) != want.reshape(-1))[0])
    says = (
        f"[{at}] is {got.reshape(-1)[at]}, reference {want.reshape(-1)[at]}; whole array "
        f"{got.tolist()}, reference {want.tolist()}"
    )
    found = Difference(name, says, got, want, rank, rule=RULES[name])
    if name == "tokens_per_expert":
        found = replace(found, expert=rank * handle.num_local_experts + at)
        here = slice(rank * handle.num_local_experts, (rank + 1) * handle.num_local_experts)
        plain = np.concatenate(routing_map)[:, here].sum(axis=0)
        padded = -(-plain // max(handle.pad_multiple, 1)) * max(handle.pad_multiple, 1)
        if (got == padded).all():
            return [found.because("rows are counted that were dropped for lack of room")]
        if (got == plain).all():
            return [found.because("padding is not counted")]
    return [found]


def rows(name, handle, rank, got, want, rule=BACK):
    """Differences of an array with one entry for each row, such as dispatched_hidden. Those after the last segment are
    not compared."""
    got, want = as_array(got), as_array(want)
    if got.shape != want.shape or not same_type(got, want):
        says = f"is {form(got)}, reference {form(want)}"
        return [Difference(name, says, got, want, rank, rule=rule)]
    used = int(handle.tokens_per_expert[rank].sum())
    got, want = np.ascontiguousarray(got[:used]), want[:used]
    different = bits(got) != bits(want)
    if not different.any():
        return []
    at = tuple(int(i) for i in np.argwhere(different)[0])
    place = _place(handle, rank, at[0])
    if len(at) > 1:
        place["column"] = at[1]
    n_rows = int(different.any(axis=tuple(range(1, different.ndim))).sum())
    says = f"is {shown(got[at])}, reference {shown(want[at])}; first of {n_rows} differing rows of {len(want)}"
    found = Difference(name, says, got, want, rank, rule=rule, row=at[0], **place)
    cause = _order(handle, rank, got, want)
    if not cause and got.ndim == 2 and want.dtype.kind not in "iu":
        cause = best(of_rows(got.view(want.dtype), want))
    return [found.because(cause)]


def _place(handle, rank, row):
    """Expert, src_rank and token of a row; empty if it has no token."""
    if handle.src_token[rank][row] < 0:
        return {}
    return dict(
        expert=rank * handle.num_local_experts + int(handle.local_expert[rank][row]),
        src_rank=int(handle.src_rank[rank][row]),
        token=int(handle.src_token[rank][row]),
    )


def _order(handle, rank, got, want):
    """Why rows differ, if the cause is their order or the rows without a token; else nothing."""
    has = handle.src_token[rank][: len(got)] >= 0
    if (bits(got)[has] == bits(want)[has]).all():
        return "rows without a token are not zero: what was there before, or what an expert made of padding"
    expert, src, token = (a[rank][: len(got)][has] for a in (handle.local_expert, handle.src_rank, handle.src_token))
    orders = {
        "by src_rank, not by expert first": (expert, token, src),
        "by token before src_rank inside an expert": (src, token, expert),
    }
    for words, keys in orders.items():
        order = np.lexsort(keys)
        if not (order == np.arange(len(order))).all() and (bits(got)[has] == bits(want)[has][order]).all():
            return f"the rows are {words}"
    if sorted(r.tobytes() for r in got) == sorted(r.tobytes() for r in want):
        return "the right rows in another order"
    return ""


def sums(name, handle, rank, got, want, of_rows):
    """Differences of a src_rank's sums over its tokens' rows. of_rows: over ranks, the rows that were summed."""
    found = [replace(d, what=name, rule=SUM) for d in compare_combined(None, rank, got, want)]
    if found and found[0].token is not None:
        got = np.asarray(got).view(want.dtype)
        with np.errstate(all="ignore"):
            for words, other in _other_sums(handle, rank, of_rows, want.dtype):
                if not compare_combined(None, rank, got, other):
                    return [found[0].because(words)]
            return [found[0].because(best(of_sums(got, want)))]
    return found


def _other_sums(handle, rank, of_rows, dtype):
    """(mistake, its result) for common mistakes."""
    row_of, n_local = handle.row_of[rank], handle.num_local_experts
    n_experts = row_of.shape[1]

    def added(experts, total):
        for e in experts:
            has = row_of[:, e] >= 0
            total[has] += of_rows[e // n_local][row_of[has, e]].astype(np.float32)
        return total

    def zeros():
        return np.zeros((len(row_of), of_rows[0].shape[1]), np.float32)

    def by_rank(order):
        total = zeros()
        for r in range(handle.n_ranks):
            of_rank = added(order(range(r * n_local, (r + 1) * n_local)), zeros())
            total += of_rank.astype(dtype).astype(np.float32)
        return total.astype(dtype)

    if handle.p2p_world_size < handle.n_ranks:
        yield ("the sums of p2p worlds are not rounded before they are added", by_rank(lambda experts: experts))
    yield (
        "all rows are summed in float32 and rounded once: the sum of each rank must be rounded before it travels",
        added(range(n_experts), zeros()).astype(dtype),
    )
    yield "the experts are added in descending order", by_rank(reversed)
    last = zeros()
    for e in range(n_experts):
        has = row_of[:, e] >= 0
        last[has] = of_rows[e // n_local][row_of[has, e]].astype(np.float32)
    yield ("rows overwrite each other: the last expert's is returned, not the sum", last.astype(dtype))


def dense_gradients(handle, rank, got, want):
    """Differences of a src_rank's gradient of probs [T, E]. got, want: [rank], or None."""
    if got is None or got[rank] is None:
        return [Difference("grad_probs", "is missing from the result", rank=rank, rule=PROBS_BACK)]
    found = []
    for d in compare_combined(None, rank, got[rank], want[rank]):
        d = replace(d, what="grad_probs", expert=d.column, column=None, rule=PROBS_BACK)
        has_no_row = d.token is not None and handle.row_of[rank][d.token, d.expert] < 0
        found.append(d.because("not zero where the pair has no row") if has_no_row else d)
    return found
