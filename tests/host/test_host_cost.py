"""What calls cost the host on a GPU, counted on a driver that runs nothing; and what they launch.

Functions are counted, not seconds, so that a busy machine decides nothing.
"""

import re
from pathlib import Path

import pytest
from commands_shown import WARNINGS_FAIL, python

HERE = Path(__file__).parent
PROGRAMS = sorted(HERE.glob("checks_of_*.py"))


def test_on_a_driver_that_counts():
    pytest.importorskip("cuda.bindings")  # not on macOS
    # in a process of its own: this one uses the simulator
    done = python(*WARNINGS_FAIL, str(HERE / "counted_rounds.py"), EPMOE_DEVICE="gpu")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    checks = [name for p in PROGRAMS for name in re.findall(r"^def (check_\w+)", p.read_text(), re.MULTILINE)]
    assert done.stdout.split() == checks
