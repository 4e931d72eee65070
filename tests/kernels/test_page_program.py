"""The program of docs/pages.md runs in the simulator and on a GPU alike, and has 40 lines."""

import re

import pytest
from commands_shown import ROOT, python

(PROGRAM,) = (part.partition("```")[0] for part in (ROOT / "docs" / "pages.md").read_text().split("```python\n")[1:])


@pytest.mark.parametrize("device", ["sim", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_it_runs(device):
    done = python("-c", PROGRAM, EPMOE_DEVICE=device)
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
