"""What calls cost the host on a GPU, counted on a driver that runs nothing; and what they launch.

Functions are counted, not seconds, so that a busy machine decides nothing.
"""

import re
from pathlib import Path

import pytest
from commands_shown import python

PROGRAMS = [pytest.param(program, id=program.stem) for program in sorted(Path(__file__).parent.glob("checks_of_*.py"))]


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_a_driver_that_counts(program):
    pytest.importorskip("cuda.bindings")  # not on macOS
    checks = re.findall(r"^def (check_\w+)", program.read_text(), re.MULTILINE)
    # in a process of its own: this one uses the simulator
    done = python("-W", "error", str(program), *checks, EPMOE_DEVICE="gpu")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert done.stdout.split() == checks
