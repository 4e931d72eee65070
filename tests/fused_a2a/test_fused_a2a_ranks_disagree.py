"""Ranks that give a call different sizes are told which rank has what, before memory is shared; then they go on."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from mpirun import as_torchrun, mpirun

HERE = Path(__file__).parent
SAID = {
    "hidden": "hidden is 16 on rank 0, 4096 on rank 1",
    "dtype": "dtype is 'bfloat16' on rank 0, 'float32' on rank 1",
    "num_experts": "num_experts is 4 on rank 0, 400 on rank 1",
    "top_k": "top_k is 1 on rank 0, 2 on rank 1",
    "experts_of_a_rank": "num_local_experts is 2 on rank 0, 90 on rank 1",
    "sms": "at least 3 SMs is True on rank 0, False on rank 1",
}


def told(what, kind, *known):
    """What both ranks print."""
    program = HERE / "disagreeing_program.py", what, kind, *known
    jobs = [mpirun(2, *program)] if kind == "mpi" else as_torchrun(2, *program)
    return "".join(job.output for job in jobs)


@pytest.mark.parametrize(
    "what, kind",
    [
        ("hidden", "mpi"),
        ("num_experts", "mpi"),
        ("experts_of_a_rank", "mpi"),
        ("sms", "mpi"),
        pytest.param(
            "dtype", "torch", marks=pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
        ),
    ],
)
@pytest.mark.by_day(1)
def test_every_rank_says_which_rank_has_what_and_goes_on(what, kind):
    printed = told(what, kind)
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} was told: what the ranks gave to \w+ differs between ranks:.*{SAID[what]}", printed
        ), printed
        assert f"rank {rank} went on: {16 * 3 * 1.0} {6 if rank == 0 else 0}" in printed, printed


def test_sizes_that_both_ranks_know_are_told_when_a_wait_expires():
    printed = told("hidden", "mpi", "known")
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} was told: rank {rank}, \w+ of rows: .* gave up after timeout=1 s. "
            "The ranks gave fused_dispatch_on_device different sizes: hidden is 16 on rank 0, 32 on rank 1",
            printed,
        ), printed
        assert f"rank {rank} went on: {16 * 3 * 1.0} {6 if rank == 0 else 0}" in printed, printed


def test_a_rank_with_bad_ids_calls_again_with_the_others_before_it_says_so():
    printed = mpirun(2, HERE / "bad_ids_program.py").output
    assert re.search(r"rank 0 was told: rank 0: token_indices\[0, 0\] is 7", printed), printed
    assert "rank 1: 0 rows" in printed, printed
    assert all(f"rank {r} went on: {n} rows" in printed for r, n in ((0, 32), (1, 0))), printed


def test_after_a_failed_call_the_hybrid_buffer_is_made_anew_without_the_calls_messages():
    job = mpirun(2, HERE / "hybrid_reset_program.py")
    assert job.status == 0 and job.output.count(f"went on: {16 * 3 * 4.0}") == 6, job.output
    named = job.said(r"was ended by .*: call (.*) on all ranks first")
    assert named == ["reset_hybrid_ep_buffer(group)"] * 4, job.output
