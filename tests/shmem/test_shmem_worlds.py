"""ShmemWorld: ranks as processes in several p2p worlds, in the simulator and on GPUs; which ranks form a p2p world."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epmoe import EPConfig, ExpertParallel, LocalWorld
from epmoe.doctor import find_mpirun
from epmoe.worlds.launcher import trial_environment
from epmoe.worlds.shmem import largest_world, split_world
from epmoe_ref.errors import EPValueError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def mpirun(n_ranks, *command, limit):
    """The output of `python -m mpi4py command...` on n_ranks ranks; it must succeed."""
    found = find_mpirun()
    assert found, "no mpirun beside this Python or on PATH: pip install 'epmoe[test]'"
    env = trial_environment() | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [found, "-n", str(n_ranks), sys.executable, "-m", "mpi4py", *map(str, command)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.nightly
def test_ranks_as_processes_put_into_each_others_windows():
    said = mpirun(4, HERE / "shmem_worlds_program.py", "1,2,4", 2, limit=100)
    assert all(
        f"rank {rank} of 4, worlds of {size}: equal" in said
        for rank in range(4)
        for size in (1, 2, 4)
    )


def test_verify_runs_between_worlds():
    said = mpirun(2, "-m", "epmoe", "verify", "--p2p-world-size", 1, "--rounds", 1, limit=60)
    assert "PASS" in said


def test_wrong_sizes_are_refused_in_words():
    program = (
        "from epmoe import EPConfig, ExpertParallel, ShmemWorld\n"
        "from epmoe_ref.errors import EPValueError\n"
        "def says(words, make):\n"
        "    try:\n        make()\n"
        "    except EPValueError as e:\n        assert words in str(e), e\n"
        "    else:\n        raise AssertionError(words)\n"
        "world = ShmemWorld()\n"
        "assert world.p2p_world_size == 2\n"
        "says('divides the 2 ranks', lambda: ShmemWorld(p2p_world_size=3))\n"
        'says("must equal the ShmemWorld\'s", lambda: ExpertParallel('
        "EPConfig(2, 2, 1, 8, 2, p2p_world_size=1, use_shmem=True), world))\n"
    )
    mpirun(2, "-c", program, limit=60)


def test_a_world_lies_on_one_host():
    two_hosts = [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert (
        largest_world(two_hosts) == 4
        and split_world(two_hosts, 8) == 0
        and split_world(two_hosts, 2) is None
    )
    assert largest_world([[0, 2]] * 1 + [[1, 3]] + [[0, 2]] + [[1, 3]]) == 1
    assert largest_world([list(range(16))] * 16) == 8


def test_a_world_that_reaches_no_other_refuses_use_shmem(monkeypatch):
    cfg = EPConfig(2, 2, 1, 8, 2, p2p_world_size=1, use_shmem=True)
    monkeypatch.setattr(LocalWorld, "shmem", False)  # as on a GPU
    with pytest.raises(EPValueError, match="use a ShmemWorld"):
        ExpertParallel(cfg, LocalWorld(2))


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("hidden, tokens, rounds", [(128, 6, 3), (7168, 128, 3)])
def test_rounds_between_worlds_of_gpus(hidden, tokens, rounds):
    """Every world of 1, 2, ... GPUs of this host; needs at least 2 GPUs."""
    from epmoe.worlds.ipc_memory import gpu_count

    n = min(gpu_count(), 4)
    assert n >= 2, f"{n} GPU: p2p worlds need at least 2"
    sizes = [size for size in (1, 2, 4) if n % size == 0]
    said = mpirun(
        n,
        HERE / "shmem_worlds_program.py",
        ",".join(map(str, sizes)),
        rounds,
        hidden,
        tokens,
        limit=390,
    )
    assert all(
        f"rank {rank} of {n}, worlds of {size}: equal" in said
        for rank in range(n)
        for size in sizes
    )
