"""Mistakes in fused_a2a rows are named: probs at ids of -1, global ids, row order, counts, sums, inputs written to."""

import ml_dtypes
import numpy as np
import pytest

from epmoe.check import check
from epmoe.check.adapters.reference import ReferenceRows

pytestmark = pytest.mark.usefixtures("each_case_once")


def changed(**functions):
    """A RowsImplementation that changes the named results of the reference, and combine's under `combined`."""
    names = ("recv_x", "recv_token_indices", "recv_token_probs", "tokens_per_expert")

    class Changed(ReferenceRows):
        dtypes = ("bf16",)

        def dispatch(self, x, token_indices, token_probs, num_experts):
            *results, handle = super().dispatch(x, token_indices, token_probs, num_experts)
            results = [
                [functions[name](rank, part.copy()) for rank, part in enumerate(parts)] if name in functions else parts
                for name, parts in zip(names, results)
            ]
            return (*results, handle)

        def combine(self, x, handle):
            combined = super().combine(x, handle)
            return functions["combined"](x, handle, combined) if "combined" in functions else combined

    return Changed


@np.errstate(all="ignore")
def bf16_sum(x, handle, combined):
    result = []
    for src_rank, rows in enumerate(handle.row_of):
        acc = np.zeros(combined[src_rank].shape, ml_dtypes.bfloat16)
        for rank in range(handle.n_ranks):
            has = rows[:, rank] >= 0
            acc[has] += x[rank][rows[has, rank]]
        result.append(acc)
    return result


@np.errstate(all="ignore")
def descending_sum(x, handle, combined):
    result = []
    for src_rank, rows in enumerate(handle.row_of):
        acc = np.zeros(combined[src_rank].shape, np.float32)
        for rank in reversed(range(handle.n_ranks)):
            has = rows[:, rank] >= 0
            acc[has] += x[rank][rows[has, rank]].astype(np.float32)
        result.append(acc.astype(ml_dtypes.bfloat16))
    return result


def lost(rows):
    """All but the last two columns."""
    kept = rows.copy()
    kept[:, -2:] = 0
    return kept


MISTAKES = {
    "prob not zero where the id is -1": changed(recv_token_probs=lambda rank, p: np.where(p == 0, np.float32(0.5), p)),
    "local ids, each at its k": changed(recv_token_indices=lambda rank, i: np.where(i >= 0, i + 3 * rank, i)),
    "by src_rank, then token": changed(recv_x=lambda rank, x: x[::-1]),
    "the number of (row, k) pairs": changed(tokens_per_expert=lambda rank, n: n + 1),
    "each row holds its neighbour's payload": changed(recv_x=lambda rank, x: np.roll(x, 1, axis=0)),
    "the last columns of the rows are lost": changed(recv_x=lambda rank, x: lost(x)),
    "the last columns of the output are lost": changed(combined=lambda x, handle, sums: [lost(s) for s in sums]),
    "zeros have the wrong sign": changed(
        combined=lambda x, handle, sums: [np.where(s == 0, -np.abs(s), s).astype(s.dtype) for s in sums]
    ),
    "the sum is rounded after each rank": changed(combined=bf16_sum),
    "the ranks are added in descending order": changed(combined=descending_sum),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named(words):
    report = check(MISTAKES[words], n_ranks=3)
    assert report.failed
    assert all(words in str(d) for o in report.failed for d in o.differences), str(report)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("fp8 pairs", lambda x: (x[0], x[1].T), "recv_x_scales is float32 (2, 6), reference float32 (6, 2)"),
        ("fp8 pairs", lambda x: (x[0], x[1] * 2), "the scales of its token"),
        ("fp8 pairs", lambda x: x[0], "recv_x is no pair"),
        ("fp16", lambda x: x.astype(ml_dtypes.bfloat16), "recv_x is bfloat16 (10, 64), reference float16 (10, 64)"),
        ("float32", lambda x: np.where(np.isnan(x), np.float32("nan"), x), "is nan [0x7fc00000], reference nan"),
    ],
)
def test_rows_of_every_type_are_compared(case, change, words):
    class Changed(ReferenceRows):
        def dispatch(self, *arguments):
            rows, *others = super().dispatch(*arguments)
            return ([change(x) for x in rows], *others)

    assert words in str(check(Changed, n_ranks=2, only=case))
    Changed.dtypes = ("bf16",)
    assert "not served" in str(check(Changed, n_ranks=2, only=case))


def test_the_place_of_a_wrong_prob():
    report = check(MISTAKES["prob not zero where the id is -1"], n_ranks=2, only="one slot")
    assert report.passed  # each row has its only expert here
    report = check(MISTAKES["prob not zero where the id is -1"], n_ranks=2, only="uneven")
    difference = report.failed[0].differences[0]
    assert (difference.what, difference.rank, difference.src_rank) == ("recv_token_probs", 0, 0)
    assert "is 0.5 [0x3f000000], reference 0 [0x00000000]" in str(difference)


def test_inputs_are_read_only():
    class Writes(ReferenceRows):
        def dispatch(self, x, token_indices, token_probs, num_experts):
            result = super().dispatch(x, token_indices, token_probs, num_experts)
            for probs in token_probs:
                probs[:] = 0
            return result

    report = check(Writes, n_ranks=2)
    assert {(d.what, d.says) for o in report.failed for d in o.differences} == {("token_probs", "was written to")}


def test_gradients_are_compared_where_there_are_any():
    class Wrong(ReferenceRows):
        def dispatch_backward(self, grad_recv_x, grad_recv_token_probs, handle):
            grad_x, grad_probs = super().dispatch_backward(grad_recv_x, grad_recv_token_probs, handle)
            return grad_x, [g * 2 for g in grad_probs]

        def combine_backward(self, grad_combined_x, handle):
            return [g[::-1] for g in super().combine_backward(grad_combined_x, handle)]

    report = check(Wrong, n_ranks=2, only="uneven")
    assert {d.what for d in report.failed[0].differences} == {"grad_token_probs"}
    Wrong.dispatch_backward = ReferenceRows.dispatch_backward
    report = check(Wrong, n_ranks=2, only="uneven")
    assert {d.what for d in report.failed[0].differences} == {"grad_x of combine"}
    Wrong.combine_backward = None
    assert "not given and not compared: gradients" in check(Wrong, n_ranks=2, only="uneven").verdict
