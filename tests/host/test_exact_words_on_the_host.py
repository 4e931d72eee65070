"""mul_rn, add_rn and fma_rn in a user's function that is called on the host: what overflows is infinite, no warning."""

import importlib.util
import warnings

import pytest
from commands_shown import WARNINGS_FAIL, python

PROGRAM = """
import numpy as np
from epmoe import add_rn, fma_rn, mul_rn

large, inf = np.float32(3e38), np.float32(np.inf)
assert mul_rn(large, large) == inf and mul_rn(-large, 2) == -inf and mul_rn(1e300, 2) == inf
assert add_rn(large, large) == inf and np.isnan(add_rn(inf, -inf)) and np.isnan(mul_rn(inf, np.float32(0)))
assert fma_rn(large, large, large) == inf and fma_rn(1e300, 1, 0) == inf and np.isnan(fma_rn(inf, 1, -inf))
several = np.array([3e38, -3e38, 1], np.float32)
for got, want in [(mul_rn(several, 2), [inf, -inf, 2]), (add_rn(several, several), [inf, -inf, 2]),
                  (fma_rn(several, several, several), [inf, inf, 2])]:
    assert got.dtype == np.float32 and got.tolist() == want
"""


def test_what_overflows_is_infinite_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(PROGRAM, {})


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda has no wheels for this system")
def test_it_is_so_with_a_gpu_too():
    done = python(*WARNINGS_FAIL, "-c", PROGRAM, EPMOE_DEVICE="gpu")
    assert done.returncode == 0 and not done.stderr, done.stderr
