"""ShmemWorld: ranks as processes in several p2p worlds, in the simulator and on GPUs; which ranks form a p2p world."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from epmoe import EPConfig, ExpertParallel, LocalWorld
from epmoe.worlds.shmem import largest_world, split_world
from epmoe_ref.errors import EPValueError

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from mpirun import mpirun

PROGRAM = Path(__file__).with_name("shmem_worlds_program.py")


def expect_equal(n_ranks, sizes, *arguments, limit):
    """Rounds over p2p worlds of these sizes are the reference's on every rank."""
    job = mpirun(n_ranks, PROGRAM, ",".join(map(str, sizes)), *arguments, limit=limit)
    wanted = {(str(rank), str(n_ranks), str(size)) for rank in range(n_ranks) for size in sizes}
    said = job.said(r"rank (\d) of (\d), worlds of (\d): equal")
    assert job.status == 0 and set(said) == wanted, job.output


@pytest.mark.nightly
def test_ranks_as_processes_put_into_each_others_windows():
    expect_equal(4, (1, 2, 4), 2, limit=100)


def test_verify_runs_between_worlds():
    job = mpirun(2, "-m", "epmoe", "verify", "--p2p-world-size", 1, "--rounds", 1)
    assert job.status == 0 and "PASS" in job.output, job.output


WRONG_SIZES = """
import pytest
from epmoe import EPConfig, EPValueError, ExpertParallel, ShmemWorld
world = ShmemWorld()
assert world.p2p_world_size == 2
with pytest.raises(EPValueError, match="divides the 2 ranks"):
    ShmemWorld(p2p_world_size=3)
with pytest.raises(EPValueError, match="must equal the ShmemWorld's"):
    ExpertParallel(EPConfig(2, 2, 1, 8, 2, p2p_world_size=1, use_shmem=True), world)
"""


def test_wrong_sizes_are_refused_in_words():
    job = mpirun(2, "-c", WRONG_SIZES)
    assert job.status == 0, job.output


def test_a_world_lies_on_one_host():
    two_hosts = [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert largest_world(two_hosts) == 4 and split_world(two_hosts, 8) == 0 and split_world(two_hosts, 2) is None
    assert largest_world([[0, 2]] * 1 + [[1, 3]] + [[0, 2]] + [[1, 3]]) == 1
    assert largest_world([list(range(16))] * 16) == 8


def test_a_world_that_reaches_no_other_refuses_use_shmem(monkeypatch):
    cfg = EPConfig(2, 2, 1, 8, 2, p2p_world_size=1, use_shmem=True)
    monkeypatch.setattr(LocalWorld, "shmem", False)  # as on a GPU
    with pytest.raises(EPValueError, match="use a ShmemWorld"):
        ExpertParallel(cfg, LocalWorld(2))


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("nvshmem") is None, reason="a ShmemWorld on GPUs needs nvshmem4py: not installed")
@pytest.mark.parametrize("hidden, tokens, rounds", [(128, 6, 3), (7168, 128, 3)])
def test_rounds_between_worlds_of_gpus(hidden, tokens, rounds):
    """Every world of 1, 2, ... GPUs of this host; needs at least 2 GPUs."""
    from epmoe.worlds.ipc_memory import gpu_count

    n = min(gpu_count(), 4)
    if n < 2:
        pytest.skip("NVSHMEM wants a GPU for each rank, and there is one")
    sizes = [size for size in (1, 2, 4) if n % size == 0]
    expect_equal(n, sizes, rounds, hidden, tokens, limit=390)
