"""What calls of epmoe.torch cost the host on a GPU, counted on a driver that runs nothing; and when memory comes back."""

import re
from pathlib import Path

import pytest
from commands_shown import python

PROGRAM = Path(__file__).with_name("checks_of_torch_calls.py")


def test_on_a_driver_that_counts():
    pytest.importorskip("cuda.bindings")  # not on macOS
    checks = re.findall(r"^def (check_\w+)", PROGRAM.read_text(), re.MULTILINE)
    # in a process of its own: this one uses the simulator
    done = python(str(PROGRAM), EPMOE_DEVICE="gpu")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert done.stdout.split() == checks
