"""Likely causes that are visible in the result and the reference, without computing anything again.

`of_sums` is for combine's results, `of_rows` for rows whose order is fixed. Each returns sentences, the most specific
first.
"""

import numpy as np

from epmoe.check.difference import bits
from epmoe.check.number_causes import FLUSHED, NAN_LOST, flushed, nan_lost
from epmoe.check.place_causes import BESIDE, NEIGHBOURS, ROWS_LOST, SUMS_LOST, last_columns_lost

SEEN = NEVER_CAME, NO_NAN, NO_SUBNORMALS, SIGN = (
    "the tokens that differ are all zeros: they were never written, or nothing came back for them",
    "sums are never NaN: every element that differs is NaN in the reference, and is none here",
    "subnormal sums are lost: every element that differs is one in the reference, and is 0 here",
    "zeros have the wrong sign: a sum begins with +0, not with its first product or with -0",
)


@np.errstate(all="ignore")
def of_sums(got, want):
    """Causes for results [T, ..., columns], of the same shape and type, that differ. Any NaN equals any other."""
    wrong = (bits(got) != bits(want)) & ~(np.isnan(got) & np.isnan(want))
    tokens = wrong.reshape(len(got), -1).any(axis=1)
    got_there, want_there = got[wrong], want[wrong]
    if not (got_there.any() or want_there.any()):
        return [SIGN]
    rows = (a.reshape(-1, a.shape[-1]) for a in (got, wrong))
    causes = {
        NEVER_CAME: not got[tokens].any(),
        NO_NAN: nan_lost(got_there, want_there),
        NO_SUBNORMALS: flushed(got_there, want_there),
        SUMS_LOST: last_columns_lost(*rows),
    }
    return [cause for cause, holds in causes.items() if holds]


@np.errstate(all="ignore")
def of_rows(got, want):
    """Causes for floats [rows, columns], of the same shape and type, that differ in their bits."""
    a, b = bits(got), bits(want)
    wrong = a != b
    got_there, want_there = got[wrong], want[wrong]
    beside = len(a) > 1 and any(
        (a[max(0, -by) : len(a) - max(0, by)] == b[max(0, by) : len(b) + min(0, by)]).all() for by in NEIGHBOURS
    )
    causes = {
        BESIDE: beside,
        NAN_LOST: nan_lost(got_there, want_there),
        FLUSHED: flushed(got_there, want_there),
        ROWS_LOST: last_columns_lost(got, wrong),
    }
    return [cause for cause, holds in causes.items() if holds]
