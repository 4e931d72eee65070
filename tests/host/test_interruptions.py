"""Ctrl-C, SystemExit, an exception of a signal handler: a call that ends half-way is refused until reset()."""

import signal
from functools import partial

import pytest
from interruptions import Interruption, at_function_call, places
from worlds_at_hand import combine, config, equal_round, parallel

from epmoe_ref.errors import EPStateError

CALLS = "dispatch combine dispatch_async dispatch_wait combine_async combine_wait reset".split()
ON_BOTH = pytest.mark.parametrize("device", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])


def rounds_up_to(ep, call, x, ids, weights):
    """The call as a function, behind what must come before it."""
    given = dict(dispatch=(x, ids), dispatch_async=(x, ids))
    if call == "dispatch_wait":
        ep.dispatch_async(x, ids)
    elif call not in given:
        d = ep.dispatch(x, ids)
        y = [a.output_tokens for a in d]
        given = dict(combine=(y, d, weights), combine_async=(y, d), combine_wait=(weights,))
        if call == "combine_wait":
            ep.combine_async(y, d)
    return partial(getattr(ep, call), *given.get(call, ()))


@ON_BOTH
@pytest.mark.parametrize("call, kind", [(call, Interruption) for call in CALLS] + [("dispatch", TimeoutError)])
@pytest.mark.by_day(5)
def test_a_call_that_was_interrupted_anywhere_is_named_and_reset_helps(call, kind, device, tonight, x, ids, weights):
    with parallel(config(), timeout=2.0, racecheck=False) as ep:
        for _ in range(2 if device == "gpu" else 1):  # the first call on a GPU compiles
            ep.reset()
            function = rounds_up_to(ep, call, x, ids, weights)
            with at_function_call(None) as seen:
                function()
        last = len(seen) * 3 // 4  # how many there are depends on the schedule
        for n in {5, *places(last, 3)[1:]} if tonight or device == "gpu" else {places(last, 3)[1]}:
            ep.reset()
            function = rounds_up_to(ep, call, x, ids, weights)
            with pytest.raises(kind), at_function_call(n, kind) as seen:
                function()
            if ep._rounds.failure is None and call != "reset":
                assert "start" not in seen[: n - 1], "something was launched"
                function()
                continue
            said = rf"{call} was ended by {kind.__name__}.*reset\(\)"
            others = (ep.dispatch, x, ids), (ep.dispatch_wait,), (ep.combine, x, [], weights)
            for other, *given in others:
                with pytest.raises(EPStateError, match=said):
                    other(*given)
            ep.reset()
            equal_round(ep, x, ids, weights)


@pytest.fixture
def ctrl_c_interrupts():
    """As in a terminal; a shell's background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_inside_a_kernel_of_the_simulator(ep, x, ids, weights):
    values = []

    def epilogue(token, col, value):
        values.append(value)
        if len(values) > ep.cfg.n_ranks:  # so many are on trial, before the launch
            signal.raise_signal(signal.SIGINT)
        return value

    d = ep.dispatch(x, ids)
    with pytest.raises(KeyboardInterrupt):
        combine(ep, d, weights, epilogue)
    with pytest.raises(EPStateError, match=r"combine was ended by KeyboardInterrupt.*reset\(\)"):
        ep.dispatch(x, ids)
    ep.reset()
    equal_round(ep, x, ids, weights)
