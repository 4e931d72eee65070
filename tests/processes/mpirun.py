"""Starts programs of several ranks, with a time limit after which the whole job is killed."""

import os
import re
import signal
import socket
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


def mpirun(n_ranks, *command, limit=60, beside=(), **environ):
    """Run `python -m mpi4py command...` on n_ranks ranks.

    command: a program's file, which may be one beside this one, or "-m", module. beside: folders of its modules.
    """
    found = find_mpirun()
    assert found, "no mpirun beside this Python or on PATH: pip install -e '.[test]'"
    first, *more = map(str, command)
    first = str(HERE / first) if first.endswith(".py") else first
    program = [sys.executable, "-m", "mpi4py", first, *more]
    environ |= dict(PYTHONPATH=_paths(first, beside))
    return started([found, "-n", str(n_ranks), *program], limit, environ)


def started(command, limit, environ):
    """Run a command; fails the test, and kills everything it started, if it takes longer than `limit` seconds."""
    begin = time.monotonic()
    process = _begun(command, environ)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end in {limit} s; it printed:\n{output}")
    return Job(process.returncode, output, time.monotonic() - begin)


def as_torchrun(n_ranks, program, *arguments, limit=60, beside=(), **environ):
    """Run a program's file on n_ranks ranks, with the variables that torchrun sets; the Job of each rank."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(n_ranks))
    environ |= dict(PYTHONPATH=_paths(program, beside))
    command, begin = [sys.executable, str(program), *map(str, arguments)], time.monotonic()
    ranks = [_begun(command, environ | dict(RANK=str(rank), LOCAL_RANK=str(rank))) for rank in range(n_ranks)]
    try:
        said = [rank.communicate(timeout=limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Job(rank.returncode, s, time.monotonic() - begin) for rank, s in zip(ranks, said)]


def _paths(program, beside):
    return os.pathsep.join(map(str, (ROOT, Path(program).parent, HERE, *beside)))


def _begun(command, environ):
    return subprocess.Popen(
        command,
        env=trial_environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"} | environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
