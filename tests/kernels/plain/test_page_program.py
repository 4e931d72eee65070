"""The program with the pages in hand runs in the simulator and on a GPU alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "page_program.py"
ROOT = PROGRAM.parents[3]


def run_on(device):
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"EPMOE_DEVICE": device, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("every token came back") == 2


def test_in_the_simulator():
    run_on("sim")


@pytest.mark.gpu
def test_on_a_gpu():
    run_on("gpu")
