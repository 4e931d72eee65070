"""Dispatches whose number of rows the host waits for, and calls with their handles: known, whatever number comes."""

import numpy as np
import pytest
from recorded_launches import EXPERTS, HIDDEN, HYBRID, ROWS, TOP_K, OnDevice, T, group
from rows_group import BF16, assert_same, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import arguments, buffers, expanding, rows
from epmoe.fused_a2a.buffer import Buffer
from epmoe.kernels.rows import records
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPValueError

__all__ = ["group"]


def exact_round(group, given, rng):
    """A dispatch whose rows the host learns, and a combine of them."""
    x, ids, probs, _ = given
    for a, new in zip(
        given, (r[0] for r in (tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K)))
    ):
        a.values[...] = new
    *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
    *got, handle = fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, group)
    for one, other in zip(got, want):
        assert_same(one, other[0], "dispatch")
    assert handle.counts.tolist() == [known.num_rows] and handle.group is group
    y = OnDevice(group.machine, np.asarray(got[0]).copy())
    combined, _ = fused_a2a.fused_combine(y, group, handle)
    assert_same(combined, reference.combine_forward([y.values], known)[0], "combine")


def exact_round_by_expert(group, given, rng):
    """The same of HybridEP, and the gradients; the number of rows."""
    x, routing_map, probs = given
    for a, new in zip(
        given,
        (
            tokens(rng, (T,), HIDDEN)[0],
            rng.random((T, EXPERTS)) < rng.random(),
            rng.random((T, EXPERTS), np.float32),
        ),
    ):
        a.values[...] = new
    *want, known = reference.hybrid_dispatch_forward(
        [x.values], [routing_map.values], [probs.values], EXPERTS, pad_multiple=2
    )
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.HybridEPDispatch.forward(
        ctx, x, routing_map, probs, group, EXPERTS, pad_multiple=2
    )
    for one, of_all in zip(got, want):
        assert_same(one, None if of_all is None else of_all[0], "dispatch by expert")
    assert handle.num_rows == known.num_rows and handle.overflow == 0
    y, row_probs = (OnDevice(group.machine, np.asarray(a).copy()) for a in got[:2])
    combined = fused_a2a.HybridEPCombine.forward(other, y, handle)
    assert_same(
        combined, reference.hybrid_combine_forward([y.values], known)[0], "combine by expert"
    )
    back = fused_a2a.HybridEPCombine.backward(other, x)[0]
    assert_same(back, reference.hybrid_combine_backward(known, [x.values])[0], "rows by expert")
    grad, _, grad_probs, *_ = fused_a2a.HybridEPDispatch.backward(
        ctx, y, row_probs, None, None, None
    )
    want_grad, want_probs = reference.hybrid_dispatch_backward(
        known, [y.values], [row_probs.values]
    )
    assert_same(grad, want_grad[0], "gradient of tokens")
    assert_same(grad_probs, want_probs[0], "gradient of probs")
    return len(y.values)


def checked_once(matrices):
    """arguments.matrices, but for a dispatch's own."""

    def check(buffer, name, *more, **options):
        assert name not in ("token_indices", "token_probs"), f"{name} was checked again"
        return matrices(buffer, name, *more, **options)

    return check


def test_a_dispatch_that_the_host_waits_for_starts_again_too(group, monkeypatch):
    rng, given = np.random.default_rng(4), [OnDevice(group.machine, a.copy()) for a in ROWS]
    for _ in range(4):
        exact_round(group, given, rng)
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "matrices", checked_once(arguments.matrices))
        before = group.recorder.n_started
        for _ in range(3):
            exact_round(group, given, rng)
    assert group.recorder.n_started >= before + 3


def test_calls_with_a_handle_start_again_whatever_number_of_rows_it_has(group):
    """What an exact dispatch gives has another number of rows in each step, and so have the combines of it."""
    rng, recorder = np.random.default_rng(8), group.recorder
    x, ids, probs, g = (OnDevice(group.machine, a.copy()) for a in (*ROWS[:3], ROWS[0]))
    seen, general = set(), []
    for _ in range(25):
        for a, new in zip(
            (x, ids, probs, g),
            (
                r[0]
                for r in (
                    tokens(rng, (T,), HIDDEN),
                    *routing(rng, (T,), EXPERTS, TOP_K),
                    tokens(rng, (T,), HIDDEN),
                )
            ),
        ):
            a.values[...] = new
        ids.values[rng.random(T) < 0.5] = -1  # tokens that go nowhere
        *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
        *got, handle = fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, group)
        n = known.num_rows[0]
        assert handle.num_rows == [n] and len(got[0]) == n
        y, row_probs = (OnDevice(group.machine, np.asarray(a).copy()) for a in (got[0], got[2]))
        before = recorder.n_started
        ctx, of_dispatch = fused_a2a.Context(), fused_a2a.Context()
        combined, _ = fused_a2a.FusedCombine.forward(ctx, y, group, handle)
        assert_same(combined, reference.combine_forward([y.values], known)[0], "combine")
        back = fused_a2a.FusedCombine.backward(ctx, g)[0]
        assert_same(back, reference.combine_backward(known, [g.values])[0], "cached dispatch")
        of_dispatch.group, of_dispatch.handle = group, handle
        grad, _, grad_probs, *_ = fused_a2a.FusedDispatch.backward(
            of_dispatch, y, None, row_probs, None, None
        )
        want_grad, want_probs = reference.dispatch_backward(known, [y.values], [row_probs.values])
        assert_same(grad, want_grad[0], "gradient of tokens")
        assert_same(grad_probs, want_probs[0], "gradient of probs")
        general.append(3 - (recorder.n_started - before))
        seen.add(n)
        with pytest.raises(EPValueError, match="rows|shape"):
            fused_a2a.fused_combine(
                OnDevice(group.machine, np.zeros((n + 1, HIDDEN), BF16)), group, handle
            )
    assert len(seen) > 3 and sum(general[-8:]) <= 1, (seen, general)


def test_exact_results_are_moved_out_of_the_staging_area_by_known_launches(group, monkeypatch):
    """Of steps whose results are all held, whatever number of rows they have, none is checked or launched anew."""
    rng, held, anew, step = np.random.default_rng(9), [], [], -1
    x, ids, probs = (OnDevice(group.machine, a.copy()) for a in ROWS[:3])
    ids.values[...] = 0, 1
    filled = [
        fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group) for _ in range(4)
    ]  # the heap
    for name in ("_move", "_send_first"):
        general = getattr(rows, name)
        monkeypatch.setattr(
            rows, name, lambda *what, general=general: anew.append(step) or general(*what)
        )
    for step in range(40):
        for a, new in zip(
            (x, ids, probs),
            (r[0] for r in (tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K))),
        ):
            a.values[...] = new
        ids.values[rng.random(T) < 0.4] = -1
        *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
        *got, handle = fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, group)
        assert handle.num_rows == known.num_rows
        held = [*held[-4:], (got, [one[0].copy() for one in want])]
        for got, wanted in held:
            for one, other in zip(got, wanted):
                assert_same(one, other, f"dispatch, looked at after step {step}")
    assert filled and anew and max(anew) < 28, anew


def test_exact_dispatches_by_expert_start_again_whatever_number_of_rows_comes(group):
    """The dispatch, what is launched behind its wait, and the combines of it: only the first ones are general."""
    rng, given = np.random.default_rng(10), [OnDevice(group.machine, a.copy()) for a in HYBRID[:3]]
    general, seen = [], set()
    for _ in range(10):
        before = group.recorder.n_started
        seen.add(exact_round_by_expert(group, given, rng))
        general.append(5 - (group.recorder.n_started - before))
    assert len(seen) > 3 and general[0] == 5 and not any(general[-3:]), (seen, general)


def test_results_of_other_numbers_of_rows_give_their_memory_back(group):
    """What nobody looks at any more is kept for a call of as many rows; the others have its memory."""
    rng, given = np.random.default_rng(11), [OnDevice(group.machine, a.copy()) for a in HYBRID[:3]]
    for _ in range(3):
        exact_round_by_expert(group, given, rng)
    buffer, lent, seen = buffers.hybrid_ep_buffer(group), [], set()
    for _ in range(8):
        n = exact_round_by_expert(group, given, rng)
        lent.append(
            [
                (loan.fields["x"].shape[0], n)
                for last in buffer.steady._last["expand"]
                for loan in last.loans
            ]
        )
        seen.add(n)
    assert len(seen) > 3 and all(rows == n for of_call in lent for rows, n in of_call), lent


@pytest.mark.parametrize(
    "one_round, arrays, sender",
    [(exact_round, ROWS, rows), (exact_round_by_expert, HYBRID[:3], expanding)],
    ids=["rows", "hybrid"],
)
def test_without_room_a_dispatch_that_started_again_is_sent_again(
    group, one_round, arrays, sender, monkeypatch
):
    """On another rank there may be more tokens than ever: then there is no room on any, and all come to the same."""
    rng, given, n_told = (
        np.random.default_rng(5),
        [OnDevice(group.machine, a.copy()) for a in arrays],
        [],
    )
    for _ in range(4):
        one_round(group, given, rng)
    buffer = buffers.buffer_of(group) if sender is rows else buffers.hybrid_ep_buffer(group)

    def more_elsewhere(*what):
        told = Buffer.told(buffer, *what)
        for words, _ in told:  # none of a check
            n_told.append(words)
            words[records.HAS_ROOM], words[records.TOKENS] = 0, words[records.TOKENS] + 2
        return told

    sent, before = [], group.recorder.n_started
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "told", more_elsewhere)
        resend = sender.resend_kernel
        patch.setattr(sender, "resend_kernel", lambda shape: sent.append(shape) or resend(shape))
        one_round(group, given, rng)
    assert (
        group.recorder.n_started == before + 1
        and len(n_told) == len(sent) == 1
        and buffer.max_tokens == T + 2
    )
    for _ in range(4):
        one_round(group, given, rng)
    assert group.recorder.n_started > before + 1
