"""Mistakes in HybridEP's rows are named: order, padding, counts, probs, sums, gradients, rows that must not be read."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from epmoe.check import check
from epmoe.check.adapters.reference import ReferenceHybrid
from epmoe_ref import fused_a2a

pytestmark = pytest.mark.usefixtures("each_case_once")
NAMES = ("hidden", "probs", "scales", "counts")


def changed(**functions):
    """A HybridImplementation that changes results of the reference: functions (handle, rank, array) by name."""

    class Changed(ReferenceHybrid):
        def dispatch(self, *arguments, **options):
            *results, handle = super().dispatch(*arguments, **options)
            results = [apply(name, handle, of) for name, of in zip(NAMES, results)]
            return (*results, handle)

        def combine(self, x, handle):
            return functions["sums"](x, handle) if "sums" in functions else super().combine(x, handle)

        def dispatch_backward(self, grad_hidden, grad_probs, handle):
            grad_x, of_probs = super().dispatch_backward(grad_hidden, grad_probs, handle)
            return grad_x, apply("grad_probs", handle, of_probs)

        def combine_backward(self, grad_combined_x, handle):
            return apply("rows_back", handle, super().combine_backward(grad_combined_x, handle))

    def apply(name, handle, of_ranks):
        if name not in functions:
            return of_ranks
        return [None if a is None else functions[name](handle, rank, a.copy()) for rank, a in enumerate(of_ranks)]

    return Changed


def reordered(*keys):
    """Rows with a token in the order of these arrays of the handle, the last one first."""

    def rows(handle, rank, a):
        has = np.flatnonzero(handle.src_token[rank] >= 0)
        a[has] = a[has][np.lexsort([getattr(handle, key)[rank][has] for key in keys])]
        return a

    return rows


def dirty_padding(handle, rank, a):
    a[handle.src_token[rank] < 0] = 1
    return a


def dirty_tail(handle, rank, a):
    a[handle.tokens_per_expert[rank].sum() :] = 1
    return a


def one_p2p_world(x, handle):
    return fused_a2a.hybrid_combine_forward(x, replace(handle, p2p_world_size=handle.n_ranks))


def summed(once=False, descending=False):
    """combine's sums: in float32 and rounded once, or experts descending."""

    @np.errstate(all="ignore")
    def sums(x, handle):
        out = []
        for row_of in handle.row_of:
            total = np.zeros((len(row_of), x[0].shape[1]), np.float32)
            for rank in range(handle.n_ranks):
                part = total if once else np.zeros_like(total)
                local = range(rank * handle.num_local_experts, (rank + 1) * handle.num_local_experts)
                for e in reversed(local) if descending else local:
                    has = row_of[:, e] >= 0
                    part[has] += x[rank][row_of[has, e]].astype(np.float32)
                if not once:
                    total += part.astype(x[0].dtype).astype(np.float32)
            out.append(total.astype(x[0].dtype))
        return out

    return sums


def reads_every_row(x, handle):
    """Multiplies the rows that have no token by 0 instead of leaving them out."""
    sums = fused_a2a.hybrid_combine_forward(x, handle)
    unused = sum(
        np.nansum(rows[token < 0]) + np.float32(np.isnan(rows[token < 0].astype(np.float32)).any() * np.nan)
        for rows, token in zip(x, handle.src_token)
        if (token < 0).any()
    )
    return [(s.astype(np.float32) + unused * 0).astype(s.dtype) for s in sums]


MISTAKES = {
    "by src_rank, not by expert first": changed(hidden=reordered("local_expert", "src_token", "src_rank")),
    "by token before src_rank inside an expert": changed(hidden=reordered("src_rank", "src_token", "local_expert")),
    "the right rows in another order": changed(hidden=lambda handle, rank, a: a[::-1].copy()),
    "rows without a token are not zero": changed(hidden=dirty_padding),
    "a row's prob is probs[token, its expert]": changed(probs=lambda handle, rank, a: a * 2),
    "one float32 scale for 128 columns": changed(scales=lambda handle, rank, a: a[:, ::-1].copy()),
    "padding is not counted": changed(
        counts=lambda handle, rank, a: np.bincount(
            handle.local_expert[rank][handle.local_expert[rank] >= 0], minlength=len(a)
        )
    ),
    "summed in float32 and rounded once": changed(sums=summed(once=True)),
    "added in descending order": changed(sums=summed(descending=True)),
    "tokens_per_expert is int32": changed(counts=lambda handle, rank, a: a.astype(np.int32)),
    "not zero where the pair has no row": changed(
        grad_probs=lambda handle, rank, a: np.where(handle.row_of[rank] < 0, np.float32(3), a)
    ),
    "combine's gradient is dispatch again": changed(rows_back=lambda handle, rank, a: a * 0),
}


@pytest.mark.parametrize("n_ranks", [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))])
def test_the_reference_passes(n_ranks):
    report = check(ReferenceHybrid, n_ranks=n_ranks)
    assert report.passed and len(report.run) == len(report.outcomes), str(report)
    assert "not given" not in report.verdict


@functools.cache
def report_on(words):
    return check(MISTAKES[words], n_ranks=2)


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named(words):
    report = report_on(words)
    named = [d for o in report.failed for d in o.differences if words in str(d)]
    assert named, str(report)


@pytest.mark.parametrize("words", [w for w in MISTAKES if "row" not in w or "order" in w])
def test_no_other_cause_is_named(words):
    causes = {d.cause for o in report_on(words).failed for d in o.differences if d.cause}
    assert all(words in cause or "another order" in cause for cause in causes), causes


def test_the_place_of_a_wrong_row():
    report = check(MISTAKES["by src_rank, not by expert first"], n_ranks=2, only="exact rows")
    difference = report.failed[0].differences[0]
    assert difference.what == "dispatched_hidden"
    for word in ("rank ", "expert ", "src_rank ", "token ", "row ", "column ", " is ", "reference "):
        assert word in str(difference)


def test_rows_without_a_token_must_not_be_read():
    report = check(changed(sums=reads_every_row), n_ranks=2, only="padding to 16")
    assert report.failed[0].differences[0].what == "combined_x" and "is nan" in str(report)


def test_rows_after_the_last_segment_may_hold_anything():
    report = check(changed(hidden=dirty_tail, probs=dirty_tail, rows_back=dirty_tail), n_ranks=2)
    assert report.passed, str(report)


def test_sums_of_p2p_worlds_must_be_rounded():
    report = check(changed(sums=one_p2p_world), only="two p2p worlds")
    assert "cause: the sums of p2p worlds are not rounded" in str(report)


def test_what_does_not_fit_is_not_counted():
    class Counts(ReferenceHybrid):
        def dispatch(self, x, routing_map, probs, num_local_experts, **options):
            *results, handle = super().dispatch(x, routing_map, probs, num_local_experts, **options)
            routed = np.concatenate(routing_map).sum(axis=0).reshape(len(x), num_local_experts)
            return *results[:3], list(routed), handle

    report = check(Counts, n_ranks=2, only="overflow")
    assert "rows are counted that were dropped for lack of room" in str(report.outcomes[0])


def test_options_and_gradients_may_be_left_out():
    class Forward(ReferenceHybrid):
        options = frozenset({"pad_multiple"})
        dispatch_backward = combine_backward = None

    report = check(Forward, n_ranks=2)
    assert report.passed and "not given and not compared: gradients" in report.verdict
    assert {o.not_served for o in report.outcomes} == {
        None,
        "num_permuted_tokens",
        "fp8_dispatch",
        "p2p_world_size",
        "without_probs",
    }
