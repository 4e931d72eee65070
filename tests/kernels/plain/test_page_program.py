"""The program of docs/pages.md runs in the simulator and on a GPU alike, and has 40 lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
(PROGRAM,) = (part.partition("```")[0] for part in (ROOT / "docs" / "pages.md").read_text().split("```python\n")[1:])


def run_on(device):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"EPMOE_DEVICE": device, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "rank 0: row_offsets [0, 1, 3], every token came back",
        "rank 1: row_offsets [0, 2, 4], every token came back",
    ]


def test_it_has_forty_lines():
    assert sum(bool(line.strip()) for line in PROGRAM.splitlines()) <= 40


def test_machines_of_gpus_have_what_it_calls():
    pytest.importorskip("cuda.bindings")  # not on macOS
    names = sorted(set(re.findall(r"machine\.(\w+)\(", PROGRAM)) - {"machine"})
    look = f"from epmoe.device.gpu_machine import GpuMachine as m; print([n for n in {names} if not hasattr(m, n)])"
    done = subprocess.run(
        [sys.executable, "-c", look],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"EPMOE_DEVICE": "gpu", "PYTHONPATH": str(ROOT)},
    )
    assert names and done.stdout == "[]\n", done.stdout + done.stderr[-3000:]


def test_in_the_simulator():
    run_on("sim")


@pytest.mark.gpu
def test_on_a_gpu():
    run_on("gpu")
