"""Launches of calls that are known, or like known ones, are told their own arrays, on a driver that runs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("known_calls_program.py")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.by_day(1)
def test_random_calls_are_told_their_own_arrays(seed):
    pytest.importorskip("cuda.bindings")  # not on macOS
    # in a process of its own: this one uses the simulator
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(seed), "400"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"EPMOE_DEVICE": "gpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
