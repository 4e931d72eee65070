"""NumPy 2.5 has no row_stack, which numba-cuda imports: epmoe adds the name for the import and removes it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np
if hasattr(np, "row_stack"):
    del np.row_stack
    np.__all__ = [name for name in np.__all__ if name != "row_stack"]
import epmoe.device
assert not hasattr(np, "row_stack"), "the name is taken back"
from numba import cuda
ptx, _ = cuda.compile_ptx(lambda a: None, (cuda.types.float32[:],), cc=(9, 0))
print("compiled" if ".target sm_90" in ptx else ptx)
"""


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="no numba-cuda on this system")
def test_kernels_compile_and_numpy_stays_as_it_was():
    environment = os.environ | {"EPMOE_DEVICE": "gpu", "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=100)
    assert done.stdout == "compiled\n", done.stdout + done.stderr
