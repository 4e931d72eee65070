"""What calls cost the host on a GPU, counted on a driver that runs nothing; and that the fast way launches the same.

Functions are counted, not seconds, so that a busy machine decides nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("host_cost_checks.py")
CHECKS = [line[4:line.index("(")] for line in PROGRAM.read_text().splitlines() if line.startswith("def check_")]


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_driver_that_counts(check):
    pytest.importorskip("cuda.bindings")        # not on macOS
    # in a process of its own: this one uses the simulator
    done = subprocess.run([sys.executable, "-W", "error", str(PROGRAM), check], capture_output=True, text=True,
                          timeout=100, env=os.environ | {"EPMOE_DEVICE": "gpu"})
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
