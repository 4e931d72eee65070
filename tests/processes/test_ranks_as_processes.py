"""One rank a process, started by mpirun: the same results as the reference, and one configuration for all ranks."""

import json
import sys

import numpy as np
import pytest
from mpirun import mpirun, started
from rank_arrays import config

from epmoe import routing
from epmoe.check.ranks import process_number, started_with_others
from epmoe.worlds.launcher import launched_size


@pytest.mark.parametrize(
    "n_ranks, kind",
    [
        pytest.param(1, "fused-plain", marks=pytest.mark.nightly),
        (2, "split-fast"),
        pytest.param(3, "fused-plain", marks=pytest.mark.nightly),
        pytest.param(4, "split-fast", marks=pytest.mark.nightly),
    ],
)
def test_every_rank_has_the_reference_s_results_round_after_round(n_ranks, kind):
    job = mpirun(n_ranks, "rounds_program.py", kind, 2)
    assert job.status == 0, job.output
    assert sorted(job.said(r"rank (\d) of (\d) equal")) == [(str(r), str(n_ranks)) for r in range(n_ranks)], job.output


@pytest.mark.nightly
def test_verify_is_one_command_under_mpirun():
    job = mpirun(4, "-m", "epmoe", "verify")
    assert job.status == 0 and job.seconds < 60, job.output
    assert job.output.count("PASS") == 1 and "4 ranks x 4 experts" in job.output, job.output


@pytest.mark.nightly
def test_verify_all_walks_the_matrix_with_the_ranks_there_are():
    job = mpirun(3, "-m", "epmoe", "verify", "--all", "--sample", "6")
    assert job.status == 0 and "3 ranks x 2 experts" in job.output and "6 cases" in job.output, job.output


def test_words_of_ranks_as_processes_are_as_the_model_has_them():
    job = mpirun(2, "-m", "epmoe", "verify", "--words", "2", "--rounds", "2")
    assert job.status == 0 and "PASS  2 worlds of 2 rounds" in job.output, job.output


@pytest.mark.nightly
def test_check_compares_the_words_of_ranks_as_processes():
    job = mpirun(2, "-m", "epmoe", "check", "mpi_plain_kernels", "--only", "uneven ranks")
    assert job.status == 0 and "PASS mpi_plain_kernels" in job.output, job.output


def test_verify_takes_a_file_of_routing(tmp_path):
    cfg, file = config(2), str(tmp_path / "batch.npz")
    routing.dump(file, routing.make(cfg, 5), cfg.n_experts)
    job = mpirun(2, "-m", "epmoe", "--input", file, "--fused", "--json")
    assert job.status == 0, job.output
    record = json.loads(job.output[job.output.index("{\n") :])  # an MPI library may print before it
    assert record["passed"], job.output
    assert sum(record["seeds"][0]["rounds"][0]["num_tokens"]) == len(np.load(file)["x"])
    assert record["case"].startswith("bf16 tokens, plain kernels (fused)")


@pytest.mark.parametrize(
    "argv, said", [(["--ranks", "3"], "MPI has 2 ranks here"), (["--racecheck"], "one process only")], ids=" ".join
)
@pytest.mark.by_day(1)
def test_verify_says_what_cannot_be_run_and_does_not_exit_0(argv, said):
    job = mpirun(2, "-m", "epmoe", *argv)
    assert job.status != 0 and said in job.output, job.output


def test_ranks_must_agree_on_the_configuration():
    job = mpirun(3, "differing_program.py")
    assert job.status == 0, job.output
    said = "EPConfig differs between ranks: combine_dtype is 'bf16' on rank 0, 1, 'fp32' on rank 2"
    for rank in range(3):
        assert f"rank {rank} refuses: {said}" in job.output, job.output
        split = "ExpertParallel differs between ranks: fused is False on rank 0, True on rank 1, 2"
        assert f"rank {rank} splits: {split}" in job.output, job.output
        assert f"rank {rank} counts: EPConfig.n_ranks=4 must equal the world's n_ranks=3" in job.output, job.output
        assert f"rank {rank} goes on" in job.output, job.output


def test_a_launcher_of_another_mpi_is_recognised():
    # As with a launcher of another MPI: several processes, each a world of size 1.
    job = started([sys.executable, "-m", "mpi4py", "-m", "epmoe", "verify"], 60, {"OMPI_COMM_WORLD_SIZE": "4"})
    assert job.status == 2, job.output
    for part in ("started 4", "knows only itself", "doctor"):
        assert part in job.output, job.output


def test_no_addition_to_a_shared_word_is_lost():
    job = mpirun(3, "atomics_program.py", 100)
    counted = job.said(r"counted (\d+) and (\d+) of (\d+)")
    assert job.status == 0 and counted == [("9600", "9600", "9600")], job.output


@pytest.mark.parametrize("value", ["", "x", "1.5", "-1", "\u00b2"])
def test_a_variable_of_a_launcher_that_holds_no_number_says_nothing(monkeypatch, value):
    for name in ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, value)
    assert launched_size() == (None, None)
    assert process_number() == 0 and not started_with_others()
