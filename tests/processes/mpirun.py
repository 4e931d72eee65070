"""Starts programs of this folder under mpirun, with a time limit after which the whole job is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from epmoe.doctor import find_mpirun
from epmoe.worlds.launcher import trial_environment

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# in the error of a fused combine of one p2p world, about the missing rank
WITHOUT_SIGNALS = (
    r"nothing, or not all, from src_rank (\d) "
    r"\((?:rows of expert \d+ are missing|no word that its combine has begun)\)"
)


@dataclass
class Job:
    """How a job ended: its exit status, what all ranks printed, and the seconds it took."""

    status: int
    output: str
    seconds: float

    def said(self, pattern):
        """All matches of a regular expression in the output; groups as re.findall gives them."""
        return re.findall(pattern, self.output)


def mpirun(n_ranks, *command, limit=60, **environ):
    """Run `python -m mpi4py command...` on n_ranks ranks; command: a file beside this one, or "-m", module."""
    first = [str(HERE / command[0])] if command[0].endswith(".py") else [command[0]]
    return started(
        [
            _mpirun(),
            "-n",
            str(n_ranks),
            sys.executable,
            "-m",
            "mpi4py",
            *first,
            *map(str, command[1:]),
        ],
        limit,
        environ,
    )


def started(command, limit, environ):
    """Run a command; fails the test, and kills everything it started, if it takes longer than `limit` seconds."""
    env = trial_environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"} | environ
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end in {limit} s; it printed:\n{output}")
    return Job(process.returncode, output, time.monotonic() - begin)


def _mpirun():
    found = find_mpirun()
    assert found, "no mpirun beside this Python or on PATH: pip install 'epmoe[test]'"
    return found
