"""One rank a process, under mpirun: rounds with uneven ranks equal the reference on every rank."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from epmoe.doctor import find_mpirun
from epmoe.worlds.launcher import trial_environment

HERE = Path(__file__).parent


def equal_on(n_ranks, *arguments, limit, program="rows_program.py"):
    """Run a program on n_ranks ranks, and look for the line of each."""
    mpirun = find_mpirun()
    assert mpirun, "no mpirun beside this Python or on PATH: pip install 'epmoe[test]'"
    program = [sys.executable, "-m", "mpi4py", str(HERE / program), *map(str, arguments)]
    command = [mpirun, "-n", str(n_ranks), *program]
    env = trial_environment() | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"}
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
    assert done.returncode == 0 and done.stdout.count(f"of {n_ranks}: equal") == n_ranks, done.stdout


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_every_rank_has_the_references_results(n_ranks):
    equal_on(n_ranks, 5, 32, 2, 3, limit=60)


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_every_rank_has_the_references_results_on_the_gpus():
    from epmoe.worlds.ipc_memory import gpu_count

    n_ranks = max(2, min(gpu_count(), 8))
    equal_on(n_ranks, 40, 512, 4, 10, limit=300)
    if gpu_count() > 1:
        equal_on(n_ranks, 4096, 7168, 64, 1, limit=300)


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is the other implementation here")
@pytest.mark.parametrize("sizes", [(300, 512, 4, 4), (2048, 7168, 32, 8)], ids=str)
def test_rows_are_those_of_torchs_own_all_to_all(sizes):
    from epmoe.worlds.ipc_memory import gpu_count

    if gpu_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank, and there is one")
    equal_on(min(gpu_count(), 8), *sizes, limit=150, program="all_to_all_program.py")
