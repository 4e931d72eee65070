"""NumPy 2.5 has no row_stack, which numba-cuda 0.30 asks for: epmoe adds the name, also for the caller's own kernels."""

import importlib.util

import pytest
from commands_shown import python

PROGRAM = """
import numpy as np
if hasattr(np, "row_stack"):
    del np.row_stack
    np.__all__ = [name for name in np.__all__ if name != "row_stack"]
import epmoe.device
from numba import cuda
ptx, _ = cuda.compile_ptx(lambda a: None, (cuda.types.float32[:],), cc=(9, 0))
print("compiled" if ".target sm_90" in ptx else ptx)
"""


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="no numba-cuda on this system")
@pytest.mark.parametrize("chosen", ["gpu", "sim"])
def test_kernels_compile(chosen, monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    done = python("-c", PROGRAM, EPMOE_DEVICE=chosen)
    assert done.stdout == "compiled\n", done.stdout + done.stderr
