"""Calls that are captured into a CUDA graph. counted_rounds.py runs this."""

import numpy as np
from counted_driver import int64
from counted_rounds import a_round, fails, since
from host_cost import at_hand, tensors

from epmoe import EPStateError, EPValueError


def check_captured_results_stay_lent():
    with at_hand(rounds=3) as (ep, driver, (x, ids, weights)):
        driver.capture = 5
        d = ep.dispatch(x, ids)
        out = ep.combine(d.output_tokens, d, weights)
        captured = {d.output_tokens.address, out.address}
        del d, out
        driver.capture = 0
        for _ in range(4):
            d = ep.dispatch(x, ids)
            out = ep.combine(d.output_tokens, d, weights)
            assert not captured & {d.output_tokens.address, out.address}


def check_a_capture_needs_no_earlier_round_and_never_waits():
    with at_hand() as (ep, driver, (x, ids, weights)):
        driver.capture = 5
        _, calls = since(driver, lambda: a_round(ep, *tensors(ids_dtype=int64)))
        # only the copies of parameters, on a stream of their own
        assert driver.waited_for == {int(ep.world.machine.copies)}, driver.waited_for
        driver.capture = 0


def check_rounds_are_captured_whole():
    with at_hand() as (ep, driver, (x, ids, weights)):
        d = ep.dispatch(x, ids)
        driver.capture = 5
        y = d.output_tokens
        fails(EPStateError, "was launched and not captured", ep.combine, y, d, weights)
        fails(EPStateError, "before the capture begins", ep.dispatch, x, ids)
        driver.capture = 0
        ep.combine(d.output_tokens, d, weights)
        driver.capture = 6
        d = ep.dispatch(x, ids)
        fails(EPStateError, "nothing has run yet", lambda: d.n_rows)
        on_host = np.zeros((4, 8), np.float32)
        fails(EPValueError, "host memory", ep.combine, d.output_tokens, d, on_host)
        driver.capture = 0
        fails(EPStateError, "capture its combine too", ep.combine, d.output_tokens, d, weights)
        driver.capture = 7  # a graph for dispatch, another for combine
        ep.combine(d.output_tokens, d, weights)
        ep.dispatch(x, ids)
        driver.capture = 0  # that capture was given up
        a_round(ep, x, ids, weights)
