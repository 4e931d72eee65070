"""The race detector and an axiomatic model of PTX's memory model agree on the first race of a run, or that there is none.

The detector sees one schedule, and each access once. So the test compares the operation of the first race; after it
the detector may forget accesses that the model remembers. The exceptions are stated in ptx_model.py and in
docs/checking.md. EPMOE_FUZZ=10000 runs that many traces.
"""

import os
from random import Random

import pytest
from detector_runs import run
from ptx_model import data_races, unordered_stores
from random_traces import Trace

TRACES, BATCHES = int(os.environ.get("EPMOE_FUZZ", 240)), 4


def first_of(pairs):
    return min((j for _, j in pairs), default=None)


def disagreement(seed):
    """(the difference in the trace of this seed, or None; whether it races)."""
    trace = Trace(Random(seed))
    notes = run(trace.programs, seed, launches=trace.launches)
    races, orders = data_races(notes.ops), unordered_stores(notes.ops)
    want, got = first_of(races), min(notes.races, default=None)
    until = min([n for n in (want, got) if n is not None], default=len(notes.ops))
    want_order, got_order = first_of(orders), min(notes.orders, default=None)
    found = None
    if want != got or min(want_order or until, until) != min(got_order or until, until):
        lines = [
            "trace %d: the model's first race is at %s %s, the detector's at %s; stores without an order: %s, %s"
            % (seed, want, [p for p in races if p[1] == want], got, want_order, got_order)
        ]
        found = "\n".join(lines + ["%3d %s" % (i, op) for i, op in enumerate(notes.ops[: until + 1])])
    return found, want is not None


@pytest.mark.timeout(0 if "EPMOE_FUZZ" in os.environ else 120)
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.by_day(1)
def test_they_find_the_same_first_race(batch):
    racing = 0
    seeds = range(batch, TRACES, BATCHES)
    for seed in seeds:
        found, races = disagreement(seed)
        assert found is None, found
        racing += races
    assert 0.3 * len(seeds) < racing < 0.9 * len(seeds), "%d of %d traces race" % (racing, len(seeds))
