"""A child that the program forks cannot touch the world of its parent, and can make one of its own."""

import gc
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from worlds_at_hand import combine, equal_combine, equal_dispatch, equal_round, parallel

from epmoe import ExpertParallel, device, fused_a2a
from epmoe.worlds.exchange import Exchange

pytestmark = pytest.mark.skipif(not device.SIM, reason="a test of the simulator")


def said_in_child(*calls):
    """What each call raised in a child, in words, or "" if nothing."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = []
            for call in calls:
                try:
                    call()
                    said.append("")
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
            gc.collect()
            os.write(theirs, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        said = json.loads(told.read())
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_a_forked_child_is_refused_and_the_parent_goes_on(ep, x, ids, weights):
    probs = [np.ones(a.shape, np.float32) for a in ids]

    def own_world():
        with parallel(ep.cfg) as own:
            equal_round(own, x, ids, weights)

    d = ep.dispatch(x, ids)
    *refused, by_own = said_in_child(
        lambda: combine(ep, d, weights),
        ep.reset,
        lambda: ExpertParallel(ep.cfg, ep.world),
        lambda: fused_a2a.fused_dispatch(x, ids, probs, ep.cfg.n_experts, ep.world),
        ep.close,
        own_world,
    )
    assert by_own == ""
    for said in refused:
        assert said.startswith("EPStateError: this process (") and (
            "was forked from the one that made the world" in said and "Make a world in this process" in said
        ), said
    equal_combine(ep.cfg, combine(ep, d, weights), equal_dispatch(ep.cfg, d, x, ids), weights)


def test_a_forked_child_sends_no_message_for_its_rank():
    sent = []
    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Isend=lambda *what: sent.append(what))
    exchange = Exchange(comm, SimpleNamespace(BYTE=None))
    (said,) = said_in_child(lambda: exchange.gather("telling", 1, 0.1))
    assert "was forked from the one that made the world" in said
