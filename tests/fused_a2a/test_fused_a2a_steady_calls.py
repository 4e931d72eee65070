"""Calls made before with the same arguments: their launches start again, with new data and the reference's results.

The simulator stands in for a GPU with one rank a process: its launches are recorded and started again as GpuMachine
does it, and the caller's arrays are seen as device arrays.
"""

import numpy as np
import pytest
from recorded_launches import EXPERTS, HIDDEN, HYBRID, ROWS, TOP_K, OnDevice, T, group
from rows_group import BF16, assert_same, host, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import heap
from epmoe_ref import fused_a2a as reference

__all__ = ["group"]


def rows_round(group, given, rng):
    """All calls of the rows family on arrays that lie where they did; their results and the reference's."""
    x, ids, probs, y = given
    for a, new in zip(
        given,
        (
            *(r[0] for r in (tokens(rng, (T,), HIDDEN), *routing(rng, (T,), EXPERTS, TOP_K))),
            tokens(rng, (len(y.values),), HIDDEN)[0],
        ),
    ):
        a.values[...] = new
    *want, known = reference.dispatch_forward([x.values], [ids.values], [probs.values], EXPERTS)
    *got, handle = fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)
    n = known.num_rows[0]
    for one, other in zip(got, want):
        assert_same(host(one)[: len(other[0])], other[0], "dispatch")
    ctx = fused_a2a.Context()
    combined, _ = fused_a2a.FusedCombine.forward(ctx, y, group, handle)
    assert_same(combined, reference.combine_forward([y.values[:n]], known)[0], "combine")
    back = fused_a2a.FusedCombine.backward(ctx, x)[0]
    assert_same(host(back)[:n], reference.combine_backward(known, [x.values])[0], "cached dispatch")


def hybrid_round(group, given, rng):
    """All calls of the HybridEP family."""
    x, routing_map, probs, y = given
    for a, new in zip(
        given,
        (
            tokens(rng, (T,), HIDDEN)[0],
            rng.random((T, EXPERTS)) < 0.5,
            rng.random((T, EXPERTS), np.float32),
            tokens(rng, (12,), HIDDEN)[0],
        ),
    ):
        a.values[...] = new
    *want, known = reference.hybrid_dispatch_forward(
        [x.values],
        [routing_map.values],
        [probs.values],
        EXPERTS,
        num_permuted_tokens=12,
        pad_multiple=2,
    )
    ctx, other = fused_a2a.Context(), fused_a2a.Context()
    *got, handle = fused_a2a.HybridEPDispatch.forward(
        ctx, x, routing_map, probs, group, EXPERTS, num_permuted_tokens=12, pad_multiple=2
    )
    for one, of_all in zip(got, want):
        assert_same(one, None if of_all is None else of_all[0], "dispatch by expert")
    assert_same(handle.overflow, known.overflow[0], "overflow")
    combined = fused_a2a.HybridEPCombine.forward(other, y, handle)
    assert_same(
        combined, reference.hybrid_combine_forward([y.values], known)[0], "combine by expert"
    )
    back = fused_a2a.HybridEPCombine.backward(other, x)[0]
    assert_same(back, reference.hybrid_combine_backward(known, [x.values])[0], "rows by expert")


@pytest.mark.parametrize(
    "one_round, arrays", [(rows_round, ROWS), (hybrid_round, HYBRID)], ids=["rows", "hybrid"]
)
def test_launches_start_again_on_new_data(group, one_round, arrays, monkeypatch):
    rng, given = np.random.default_rng(1), [OnDevice(group.machine, a.copy()) for a in arrays]
    started = [0]
    for _ in range(
        8
    ):  # until every call has been made in the memory that it finds when all take turns
        one_round(group, given, rng)
        started.append(group.recorder.n_started)
    assert np.diff(started)[-3:].tolist() == [3, 3, 3], (
        "a call that was made before took the general way"
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            heap, "_lend", lambda *what: pytest.fail("results that nobody holds were made anew")
        )
        one_round(group, given, rng)
    others = [OnDevice(group.machine, a.copy()) for a in arrays]
    before = group.recorder.n_started
    one_round(group, others, rng)
    assert group.recorder.n_started < before + 3, "other arrays have launches of their own"


@pytest.mark.parametrize(
    "one_round, arrays", [(rows_round, ROWS), (hybrid_round, HYBRID)], ids=["rows", "hybrid"]
)
def test_launches_for_new_arrays_are_made_of_earlier_ones(group, one_round, arrays):
    """From the first calls of a form it is learned what follows from addresses; later ones start at once."""
    rng, recorder = np.random.default_rng(6), group.recorder
    kept, general = [], []
    for _ in range(12):
        kept.append([OnDevice(group.machine, a.copy()) for a in arrays])
        before = recorder.n_started
        one_round(group, kept[-1], rng)
        general.append(3 - (recorder.n_started - before))
    assert general[0] == 3 and general[-6:] == [0] * 6, general
    begun = recorder.n_begun
    assert begun >= 18
    for given in kept[-4:]:  # and when they come again, not even the parameters are made anew
        one_round(group, given, rng)
    assert recorder.n_begun == begun


def test_steps_of_several_layers_start_again_though_all_results_are_held(group):
    """Forward and backward of 4 layers: some results find no room in the heap, and are moved."""
    rng, recorder = np.random.default_rng(7), group.recorder
    layers = [[OnDevice(group.machine, a.copy()) for a in ROWS] for _ in range(4)]

    def step():
        held = []
        for x, ids, probs, y in layers:
            for a, new in zip(
                (x, ids, probs, y),
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
            *want, known = reference.dispatch_forward(
                [x.values], [ids.values], [probs.values], EXPERTS
            )
            *got, handle = fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)
            ctx = fused_a2a.Context()
            out, _ = fused_a2a.FusedCombine.forward(ctx, y, group, handle)
            held.append((got, want, known, ctx, out, x, y))
        for got, want, known, ctx, out, x, y in reversed(held):
            n = known.num_rows[0]
            back = fused_a2a.FusedCombine.backward(ctx, x)[0]
            assert_same(
                host(back)[:n],
                reference.combine_backward(known, [x.values])[0],
                "combine's gradient",
            )
            assert_same(out, reference.combine_forward([y.values[:n]], known)[0], "combine")
            for one, other in zip(got, want):
                assert_same(host(one)[: len(other[0])], other[0], "dispatch")

    for _ in range(8):
        before = recorder.n_started
        step()
    assert recorder.n_started == before + 12


@pytest.mark.parametrize("kind", ["rows", "hybrid"])
def test_handles_that_take_turns_make_nothing_anew(group, kind, monkeypatch):
    """A caller who keeps a handle until the next dispatch has two in turn, whose combines differ."""
    x, of_routing, probs, y = (
        OnDevice(group.machine, a.copy()) for a in (ROWS if kind == "rows" else HYBRID)
    )
    of_routing.values[...] = (0, 1) if kind == "rows" else True

    def a_round():
        if kind == "rows":  # whose heap has no room for the result of a cached dispatch as well
            *_, handle = fused_a2a.fused_dispatch_on_device(x, of_routing, probs, EXPERTS, group)
            fused_a2a.fused_combine(y, group, handle)
            return handle
        *_, handle = fused_a2a.hybrid_ep_dispatch(
            x, of_routing, probs, group, EXPERTS, num_permuted_tokens=12
        )
        ctx = fused_a2a.Context()
        fused_a2a.HybridEPCombine.forward(ctx, y, handle)
        fused_a2a.HybridEPCombine.backward(ctx, x)
        return handle

    for _ in range(10):  # until launches are known in all the memory that calls find
        handle = a_round()
    before = group.recorder.n_started
    monkeypatch.setattr(
        heap, "_lend", lambda *what: pytest.fail("results that nobody holds were made anew")
    )
    for _ in range(4):
        handle = a_round()
    assert (
        group.recorder.n_started == before + 4 * (2 if kind == "rows" else 3) and handle is not None
    )


def test_what_changes_in_the_buffer_makes_calls_new(group):
    rng, given = np.random.default_rng(2), [OnDevice(group.machine, a.copy()) for a in ROWS]
    for _ in range(3):
        rows_round(group, given, rng)
    before = group.recorder.n_started
    fused_a2a.get_buffer(group, 0).want_tokens(T + 3)
    given[3] = OnDevice(group.machine, np.zeros((T + 3, HIDDEN), BF16))
    rows_round(group, given, rng)
    assert group.recorder.n_started == before


@pytest.mark.parametrize(
    "one_round, arrays", [(rows_round, ROWS), (hybrid_round, HYBRID)], ids=["rows", "hybrid"]
)
def test_nothing_gets_the_memory_that_a_captured_graph_writes_to(
    group, one_round, arrays, monkeypatch
):
    """Results, handles and scratch of captured calls are lent for good, and their launches do not start again."""
    rng, given, recorder = (
        np.random.default_rng(3),
        [OnDevice(group.machine, a.copy()) for a in arrays],
        group.recorder,
    )
    for _ in range(3):
        one_round(group, given, rng)
    lent, of_a_graph, lend = [], [], heap._lend

    def seen(piece, buffer, start, *more):
        place = buffer.address + start
        assert place not in of_a_graph, "memory that a graph writes to at its replays"
        lent.append(place)
        return lend(piece, buffer, start, *more)

    monkeypatch.setattr(heap, "_lend", seen)
    recorder.capturing = True
    before = recorder.n_started
    one_round(group, given, rng)
    assert recorder.n_started == before and lent
    of_a_graph += lent
    recorder.capturing = False
    for _ in range(3):
        one_round(group, given, rng)
    assert recorder.n_started > before


def test_a_captured_call_is_lent_memory_once(group):
    """For good; the heap has room for two, so a captured dispatch and cached dispatch are received where they stay."""
    rng, given, recorder = (
        np.random.default_rng(4),
        [OnDevice(group.machine, a.copy()) for a in ROWS],
        group.recorder,
    )
    for _ in range(3):
        rows_round(group, given, rng)
    recorder.capturing = True
    rows_round(group, given, rng)
    assert len(fused_a2a.get_buffer(group, 0).ranks[0].heap.captured) == 2
    recorder.capturing = False


@pytest.mark.parametrize("held", ["x", "handle"])
def test_results_that_somebody_holds_are_not_given_again(group, held):
    """Whatever is held of a call's results keeps all of them; when nothing is, the same objects come back."""
    x, ids, probs, _ = (OnDevice(group.machine, a.copy()) for a in ROWS)
    ids.values[...] = 0, 1

    def dispatch():
        return fused_a2a.fused_dispatch_on_device(x, ids, probs, EXPERTS, group)

    for _ in range(4):
        dispatch()
    first = dispatch()
    kept, values = (first[0] if held == "x" else first[-1]), host(first[0]).copy()
    del first
    x.values[...] += 1
    other = dispatch()
    assert not any(one is kept for one in other)
    if held == "x":
        assert_same(kept, values, "results that are held")
    del kept, other
    dispatch()
    before = group.recorder.n_started
    again = dispatch()
    name = id(again[0])
    del again
    assert id(dispatch()[0]) == name and group.recorder.n_started == before + 2
