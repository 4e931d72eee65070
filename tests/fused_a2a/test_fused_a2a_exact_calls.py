"""Calls whose number of rows the host waits for, step after step: plans are the same, whatever number comes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from against_reference import equal_hybrid, equal_rows
from rows_group import BF16, assert_same, group_of, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import buffers
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPStateError, EPValueError
from epmoe_ref.strategies import HybridWorld, RowsWorld

T, EXPERTS, TOP_K, HIDDEN = (5, 3), 4, 2, 16


def by_rows(group, rng):
    """A step of fused_dispatch, fused_combine and their gradients, equal to the reference; numbers of rows."""
    x, (ids, probs) = tokens(rng, T, HIDDEN), routing(rng, T, EXPERTS, TOP_K, dropped=0.5)
    _, handle = equal_rows(group, RowsWorld(x, ids, probs, EXPERTS), rng, hidden=HIDDEN)
    assert handle.group is group
    wrong = [np.zeros((n + 1, HIDDEN), BF16) for n in handle.num_rows]
    with pytest.raises(EPValueError, match="rows"):
        fused_a2a.fused_combine(wrong, group, handle)
    return tuple(handle.num_rows)


def by_expert(group, rng):
    """The same of HybridEP."""
    x, maps = tokens(rng, T, HIDDEN), [rng.random((n, EXPERTS)) < rng.random() for n in T]
    probs = [rng.random((n, EXPERTS), np.float32) for n in T]
    world = HybridWorld(x, maps, probs, EXPERTS // 2, None, 2, False, None)
    _, handle = equal_hybrid(group, world, rng, BF16, HIDDEN)
    return tuple(handle.num_rows)


EITHER = pytest.mark.parametrize(
    "step, buffer_of", [(by_rows, buffers.buffer_of), (by_expert, buffers.hybrid_ep_buffer)], ids=["rows", "hybrid"]
)


@EITHER
def test_numbers_of_rows_differ_and_plans_do_not(step, buffer_of):
    group, rng = group_of(2), np.random.default_rng(8)
    step(group, rng)
    seen, plans = {step(group, rng)}, dict(buffer_of(group)._plans)
    assert plans
    for _ in range(2):
        seen.add(step(group, rng))
    assert len(seen) == 3 and buffer_of(group)._plans == plans


@EITHER
def test_while_a_graph_is_captured_memory_does_not_grow_and_nothing_is_launched(step, buffer_of, monkeypatch):
    group, rng = group_of(2), np.random.default_rng(8)
    buffer = buffer_of(group)

    def expect_refused(said):
        before = buffer.pool_layout, group.machine.count
        with monkeypatch.context() as capturing, pytest.raises(EPStateError, match=said):
            capturing.setattr(buffer, "capture", lambda: 7)
            step(group, rng)
        assert (buffer.pool_layout, group.machine.count) == before

    expect_refused("run the step once before")
    step(group, rng)
    remedy = {by_rows: "call fused_dispatch_on_device", by_expert: "give num_permuted_tokens"}
    expect_refused(f"captured into a CUDA graph.*{remedy[step]}")
    monkeypatch.setattr(__import__(__name__), "T", (9, 6))
    buffer.max_tokens = 0
    expect_refused("run the step once before")
    step(group, rng)


@pytest.mark.parametrize("on", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_another_thread_may_make_the_call(on):
    group, rng = group_of(2), np.random.default_rng(1)
    for step in (by_rows, by_expert):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(step, group, rng).result()


@EITHER
def test_without_room_a_dispatch_begins_again(step, buffer_of, monkeypatch):
    """A rank that has more tokens than any before: there is no room for its rows, and all ranks come to the same."""
    group, rng, begun = group_of(2), np.random.default_rng(6), []
    step(group, rng)
    monkeypatch.setattr(__import__(__name__), "T", (20, 3))
    buffer = buffer_of(group)
    call = buffer.call
    monkeypatch.setattr(buffer, "call", lambda name, *more: begun.append(name) or call(name, *more))
    step(group, rng)
    assert begun[0] == begun[1] != begun[2] and buffer.max_tokens == 20


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize(
    "pad, expected",
    [(64, [2, 1, 2, 1, 1, 1]), (32, [2, 1, 1, 1, 1, 1])],
    ids=["twice as many rows", "as many as there is room for"],
)
@pytest.mark.by_day(2)
def test_hybrid_ep_exact_is_one_launch_if_there_are_not_many_more_rows_than_before(few, pad, expected):
    group, rng, launches = group_of(2, lamport_rows=few), np.random.default_rng(3), []
    n_tokens = (4, 3) if few else T

    def step(experts):
        """All tokens go to this many of each rank's two experts, padded to `pad` rows each."""
        x, of_all = tokens(rng, n_tokens, HIDDEN), np.arange(EXPERTS) % (EXPERTS // 2) < experts
        maps = [np.tile(of_all, (n, 1)) for n in n_tokens]
        probs = [rng.random((n, EXPERTS), np.float32) for n in n_tokens]
        before = group.machine.count
        *got, _ = fused_a2a.HybridEPDispatch.forward(
            fused_a2a.Context(), x, maps, probs, group, EXPERTS // 2, pad_multiple=pad
        )
        launches.append((group.machine.count - before) // len(n_tokens))
        *want, _ = reference.hybrid_dispatch_forward(x, maps, probs, EXPERTS // 2, pad_multiple=pad)
        for one, other in zip(got, want):
            assert_same(one, other, f"launch {len(launches)}")

    for experts in (1, 1, 2, 2, 1, 2):
        step(experts)
    assert launches == expected
