"""One rank a process, under mpirun: rounds with uneven ranks equal the reference on every rank."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from mpirun import mpirun

HERE = Path(__file__).parent


def equal_on(n_ranks, *arguments, limit):
    """Run rows_program.py on n_ranks ranks, and look for the line of each."""
    job = mpirun(n_ranks, HERE / "rows_program.py", *arguments, limit=limit)
    assert job.status == 0 and job.output.count(f"of {n_ranks}: equal") == n_ranks, job.output


@pytest.mark.parametrize(
    "n_ranks, world",
    [
        pytest.param(1, "MPIWorld", marks=pytest.mark.nightly),
        pytest.param(3, "MPIWorld", marks=pytest.mark.nightly),
        (2, "MPIWorld"),
        pytest.param(2, "ShmemWorld", marks=pytest.mark.nightly),
    ],
)
def test_every_rank_has_the_references_results(n_ranks, world):
    equal_on(n_ranks, 5, 16, 2, 2 if n_ranks > 2 else 1, world, limit=60)


def test_ranks_that_grow_by_different_numbers_of_tokens_agree():
    job = mpirun(2, HERE / "growing_program.py", limit=100)
    of_ranks = job.said(r"right sums, (at most 12 tokens, PoolLayout\(.*?\))")
    assert job.status == 0 and len(of_ranks) == 2 and len(set(of_ranks)) == 1, job.output


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_a_gpu", [1, 2])
def test_every_rank_has_the_references_results_on_the_gpus(ranks_a_gpu):
    """One round of 4096 tokens a rank and many of few, with 256 experts; two ranks on a GPU take turns by time slices.

    With one GPU, few tokens.
    """
    from epmoe.worlds.ipc_memory import gpu_count

    n_ranks = max(2, min(ranks_a_gpu * gpu_count(), 8))
    equal_on(n_ranks, 4096 if gpu_count() > 1 else 40, 7168, 256 // n_ranks, 10 // ranks_a_gpu, limit=280)


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(find_spec("nvshmem") is None, reason="a ShmemWorld on GPUs needs nvshmem4py: not installed")
def test_every_rank_has_the_references_results_in_nvshmems_memory():
    from epmoe.worlds.ipc_memory import gpu_count

    n_ranks = min(gpu_count(), 8)
    if n_ranks < 2:
        pytest.skip("NVSHMEM wants a GPU for each rank, and there is one")
    equal_on(n_ranks, 40, 7168, 256 // n_ranks, 2, "ShmemWorld", limit=180)
