"""Ranks of a benchmark launch the same kernels on live memory, though garbage, memory and held results differ."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands_shown import WARNINGS_FAIL

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_contenders_on_a_driver_that_runs_nothing():
    pytest.importorskip("cuda.bindings")  # not on macOS
    program = Path(__file__).with_name("ranks_program.py")
    # in another process, because this one uses the simulator
    done = subprocess.run(
        [sys.executable, *WARNINGS_FAIL, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=115,
        env=os.environ | {"EPMOE_DEVICE": "gpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert re.fullmatch(r"\d+ launches and meetings of each rank, all alike; \d+ addresses\n", done.stdout)
