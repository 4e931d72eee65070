"""One call at a time: a second one, of another thread or of a function inside a call, is refused and harms nothing."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from worlds_at_hand import combine, same_bits

from epmoe import LocalWorld, fused_a2a
from epmoe_ref.errors import EPStateError

UNDER_WAY = "another call is under way, in another thread or around a function of yours"


def in_a_thread(call):
    """What a call in another thread raised, in words."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(call).exception(20)
    return f"{type(error).__name__}: {error}"


def test_calls_inside_a_call_are_refused(ep, x, ids, weights):
    said = []

    def epilogue(token, col, value):
        if not said:
            said.extend(in_a_thread(call) for call in (lambda: ep.dispatch(x, ids), ep.reset, ep.close))
        return value

    out = combine(ep, ep.dispatch(x, ids), weights, epilogue)
    for s, name in zip(said, ("dispatch", "reset", "close")):
        assert f"EPStateError: {name}: {UNDER_WAY}" in s
    assert same_bits(combine(ep, ep.dispatch(x, ids), weights), out)


def test_a_function_that_calls_is_refused(ep, x, ids, weights):
    d = ep.dispatch(x, ids)
    with pytest.raises(EPStateError, match=UNDER_WAY):
        combine(ep, d, weights, lambda token, col, value: ep.dispatch(x, ids))


def test_rows_from_two_threads_at_once_are_refused(monkeypatch, x, ids):
    world, probs, said = LocalWorld(2), [np.ones(a.shape, np.float32) for a in ids], []

    def dispatch():
        return fused_a2a.fused_dispatch(x, ids, probs, 4, world)

    want = dispatch()[0]
    launch = world.machine.launch

    def launch_beside_a_thread(*arguments, **options):
        if not said:
            said.append("")
            said[:] = map(in_a_thread, (dispatch, fused_a2a.get_buffer(world, 0).close))
        return launch(*arguments, **options)

    monkeypatch.setattr(world.machine, "launch", launch_beside_a_thread)
    assert same_bits(dispatch()[0], want)
    for s, name in zip(said, ("fused_dispatch", "close"), strict=True):
        assert s.startswith(f"EPStateError: {name}: {UNDER_WAY}")
