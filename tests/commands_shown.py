"""A command run in this process or in one of its own, and options of a verify that takes no time."""

import os
import subprocess
import sys
from pathlib import Path

from epmoe.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--ranks 2 --experts-per-rank 2 --top-k 2 --hidden 16 --tokens 4 --rounds 2".split()
# warnings are errors, but for what numba-cuda imports with NumPy 2.5
WARNINGS_FAIL = "-W", "error", "-W", "ignore::DeprecationWarning:numba.cuda.np.npdatetime_helpers"
SMALL_BUT_EXPERTS = [*SMALL[:2], *SMALL[4:]]


def shown(capsys, *argv):
    """(exit status, what it wrote) of epmoe with these words."""
    status = main(list(argv))
    return status, capsys.readouterr()


def refused_in_a_line(capsys, said, *argv):
    """epmoe with these words cannot run, and one line says why."""
    status, out = shown(capsys, *argv)
    assert status == 2 and said in out.err and len(out.err.splitlines()) == 1, out.err


def python(*argv, **environ):
    """How Python with these words ended, and what it wrote; started in the project's folder."""
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=100, env=os.environ | environ
    )
