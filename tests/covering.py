"""Which cases of a parametrised test run by day."""

import collections
import itertools

import pytest


def rest_at_night(names, by_day):
    """Parameters of a test: these names; those that are not in by_day run at night."""
    return [name if name in by_day else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def covering(cases, at_most):
    """Indices of at most that many cases, each a set of values, which together have as many values as possible.

    The next one is always the case with the most new values; among those the one whose pairs of values, then whose
    values, occurred least.
    """
    seen, chosen = collections.Counter(), []

    def pairs(case):
        return map(frozenset, itertools.combinations(case, 2))

    def rank(i):
        fresh = sum(not seen[value] for value in cases[i])
        return fresh, -sum(seen[p] for p in pairs(cases[i])), -sum(seen[v] for v in cases[i]), -i

    while len(chosen) < at_most:
        best = max(range(len(cases)), key=rank)
        if not rank(best)[0]:
            break
        chosen.append(best)
        seen.update([*cases[best], *pairs(cases[best])])
    return chosen
