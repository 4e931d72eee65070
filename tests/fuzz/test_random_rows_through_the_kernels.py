"""Fuzzing: worlds of epmoe_ref.strategies through the kernels of rows, forward and backward, to the bit.

Any schedule and grid, small and large batches in turn. Memory holds garbage before the first call.
How many worlds: nightly.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import batches, law

from epmoe_ref import strategies

sys.path.insert(0, str(Path(__file__).parents[1] / "fused_a2a"))
from against_reference import equal_hybrid, equal_rows
from rows_group import BF16, FP16, FP32, group_of

GRIDS = st.sampled_from(((2, 32), (3, 64), (6, 32)))  # blocks and threads of a rank
RACECHECK = st.sampled_from((True, None, None))
SHARE = 0.06  # of all worlds, for each of the two
FEW = 2  # small batches, which use other kernels


def few(world):
    """The same world with only the first tokens of each rank."""
    return replace(
        world, **{name: [a[:FEW] for a in getattr(world, name)] for name in ("x", "token_indices", "token_probs")}
    )


ROWS = (
    strategies.rows_worlds(max_ranks=3),
    st.permutations((few, replace)),
    st.sampled_from((BF16, FP16, FP32)),
    equal_rows,
)
BY_EXPERT = (strategies.hybrid_worlds(max_ranks=3), st.just((replace,)), st.sampled_from((BF16, FP16)), equal_hybrid)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", [ROWS, BY_EXPERT], ids=["rows", "rows by expert"])
@pytest.mark.parametrize("batch", batches(SHARE))
def test_results_are_the_references(batch, kind):
    worlds, calls, dtypes, equal = kind

    @law(batch, SHARE)
    @given(worlds, calls, dtypes, GRIDS, strategies.seeds(), RACECHECK)
    def results_agree(world, calls, dtype, grid, schedule, racecheck):
        grid = dict(n_sms=grid[0], num_threads=grid[1])
        group = group_of(len(world.x), **grid, seed=schedule, racecheck=racecheck)
        rng = np.random.default_rng(schedule)
        with np.errstate(all="ignore"):
            for of_call in calls:
                equal(group, of_call(world), rng, dtype)

    results_agree()
