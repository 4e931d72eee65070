"""One rank a process: a block trained; torch's own way; calls in any order; signatures."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

import epmoe.torch
from epmoe import fused_a2a

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from mpirun import mpirun

HERE = Path(__file__).parent
FUNCTIONS = ("FusedDispatch", "FusedDispatchOnDevice", "FusedCombine", "HybridEPDispatch", "HybridEPCombine")


def as_wanted(program, n_ranks, *arguments, limit):
    """Run a program on n_ranks ranks, and look for the line of each."""
    beside = [HERE.parent / "fused_a2a"]
    job = mpirun(n_ranks, HERE / program, *arguments, limit=limit, beside=beside)
    assert job.status == 0 and job.output.count(f"of {n_ranks}: as wanted") == n_ranks, job.output


def test_training_over_two_processes():
    as_wanted("training_program.py", 2, 2, 4, 8, 16, limit=100)


def test_rows_and_sums_are_those_of_torchs_own_all_to_all():
    as_wanted("all_to_all_program.py", 2, 6, 16, 2, 2, limit=100)


def test_calls_in_any_order_have_exact_results_that_stay():
    as_wanted("any_order_program.py", 2, 8, 3, 16, limit=100)


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_calls_in_any_order_have_exact_results_that_stay_on_gpus():
    n_ranks = max(2, min(torch.cuda.device_count(), 8))
    as_wanted("any_order_program.py", n_ranks, 2500, 300, 1024, limit=180)


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_fifty_steps_of_training_over_two_gpus():
    as_wanted("training_program.py", 2, 50, 512, 1024, 512, limit=300)


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_rows_and_sums_are_those_of_nccls_all_to_all():
    n_ranks = min(torch.cuda.device_count(), 8)
    if n_ranks < 2:
        pytest.skip("NCCL wants a GPU for each rank, and there is one")
    as_wanted("all_to_all_program.py", n_ranks, 4096, 7168, 256 // n_ranks, 8, limit=180)


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_a_thousand_steps_take_no_more_memory_and_graphs_of_a_step_run_again_on_all_ranks():
    n_ranks = min(torch.cuda.device_count(), 8)
    as_wanted("steady_program.py", n_ranks, 1000, 128, 7168, 256 // n_ranks, 8, limit=180)


@pytest.mark.parametrize("name", [n for n in epmoe.torch.__all__ if n not in (*FUNCTIONS, "ProcessGroupWorld")])
def test_functions_have_the_pages_signatures(name):
    assert inspect.signature(getattr(epmoe.torch, name)) == inspect.signature(getattr(fused_a2a, name))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_classes_are_functions_of_autograd_with_the_pages_arguments(name, method):
    ours, theirs = getattr(epmoe.torch, name), getattr(fused_a2a, name)
    assert issubclass(ours, torch.autograd.Function)
    parameters = inspect.signature(inspect.unwrap(getattr(ours, method))).parameters
    assert list(parameters.values()) == list(inspect.signature(getattr(theirs, method)).parameters.values())
