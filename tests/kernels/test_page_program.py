"""The program of docs/pages.md runs in the simulator and on a GPU alike, and has 40 lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    names = set(re.findall(r"machine\.(\w+)\(", PROGRAM)) - {"machine"}
    source = (ROOT / "epmoe" / "device" / "gpu_machine.py").read_text()
    assert names and names <= set(re.findall(r"^    def (\w+)\(", source, re.MULTILINE))


def test_in_the_simulator():
    run_on("sim")


@pytest.mark.gpu
def test_on_a_gpu():
    run_on("gpu")
