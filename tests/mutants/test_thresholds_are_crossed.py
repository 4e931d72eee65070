"""Every threshold of the kernels is crossed by some world; a new one without a world is told."""

import os

import pytest

from epmoe.__main__ import main
from epmoe.command_line import INTERRUPTED
from epmoe.mutants import hunt, thresholds
from epmoe.mutants.thresholds import ABOVE, AT, BELOW, LOOK
from epmoe.mutants.worlds import WORLDS

SOURCE = """
MOST, NAMES = max(MOST_PARTS, 3), 8
def make(shape):
    def f(n, x):
        if n <= MOST_PARTS and x < n:
            return min(n, 2 * shape.tuning.few_tokens)
        return MOST_PARTS > x
    return f
"""
SITES = [
    ("f.py", 5, "n <= MOST_PARTS"),
    ("f.py", 6, "min(n, 2 * shape.tuning.few_tokens)"),
    ("f.py", 7, "MOST_PARTS > x"),
]


def test_named_numbers_in_functions_are_thresholds():
    _, found = thresholds.marked("f.py", SOURCE)
    most, few = {"MOST_PARTS"}, {"few_tokens"}
    want = (most, "LtE", False), (few, "min", False), (most, "Gt", True)
    assert found == dict(zip(SITES, want))


def test_a_variable_that_holds_a_number_is_a_threshold():
    source = """
def make(shape):
    few, n_parts, share = shape.tuning.few_tokens, count(), shape.sending.tenths
    def f(n):
        return n <= few and n < n_parts and n < share and max(n, 1)
"""
    _, found = thresholds.marked("f.py", source)
    want = [("n <= few", {"few_tokens"}), ("n < share", {"tenths"})]
    assert [(text, one.names) for (*_, text), one in found.items()] == want


def test_sides_are_those_of_the_quantity():
    told = []

    def look(site, what, turned, a, b):
        told.append((site[2], turned))
        return thresholds.BY_NAME[what](a, b)

    class shape:
        class tuning:
            few_tokens = 2

    names = {"MOST_PARTS": 8, LOOK: look}
    exec(thresholds.marked("f.py", SOURCE)[0], names)
    f = names["make"](shape)
    assert [f(8, 1), f(8, 9), f(9, 7)] == [4, False, True]
    assert told == [
        ("n <= MOST_PARTS", False),
        ("min(n, 2 * shape.tuning.few_tokens)", False),
        ("n <= MOST_PARTS", False),
        ("MOST_PARTS > x", True),
        ("n <= MOST_PARTS", False),
        ("MOST_PARTS > x", True),
    ]


@pytest.mark.parametrize(
    "site, sides, crossed",
    [
        (SITES[0], {BELOW}, False),
        (SITES[0], {BELOW, AT}, False),
        (SITES[0], {AT, ABOVE}, True),
        (SITES[0], {BELOW, ABOVE}, True),
        (SITES[0], set(), False),
        (SITES[1], {BELOW, AT}, False),
        (SITES[1], {BELOW, ABOVE}, True),
        (SITES[2], {BELOW, AT}, True),
        (SITES[2], {AT, ABOVE}, False),
    ],
)
def test_a_threshold_without_a_world_on_each_side_is_told(monkeypatch, site, sides, crossed):
    monkeypatch.setattr(thresholds, "thresholds", lambda: {site: thresholds.marked("f.py", SOURCE)[1][site]})
    found = thresholds.crossings({"a world": {site: sides}})
    assert thresholds.uncrossed(found) == ([] if crossed else [site])
    monkeypatch.setattr(thresholds, "EXPLAINED", {"MOST_PARTS": "why", "few_tokens": "why"})
    assert thresholds.uncrossed(found) == []


def test_a_world_comes_above_the_threshold_that_it_is_made_for():
    _, sides = thresholds.sides_in("few tokens, too many experts")
    seen = [s for (_, _, text), s in sides.items() if text.endswith("few_experts")]
    assert seen == [{ABOVE}]


def test_what_is_explained_is_a_threshold():
    there = {name for site, one in thresholds.thresholds().items() for name in (site[2], *one.names)}
    assert set(thresholds.EXPLAINED) <= there


def test_no_more_processes_than_cores_are_started(monkeypatch):
    def pool(jobs):
        assert jobs == os.cpu_count()
        raise KeyboardInterrupt

    monkeypatch.setattr(hunt, "pool", pool)
    assert main(["mutants", "--thresholds", "--jobs", "100000"]) == INTERRUPTED


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_threshold_is_crossed():
    with hunt.pool(2) as workers:
        seen = dict(workers.imap_unordered(thresholds.sides_in, WORLDS))
    assert thresholds.uncrossed(thresholds.crossings(seen)) == []
