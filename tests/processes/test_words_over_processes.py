"""The plain kernels' memory with one rank a process: every word equals the model. Needs mpirun, no GPU."""

import pytest
from mpirun import mpirun


def test_words_of_ranks_as_processes_are_as_the_model_has_them():
    job = mpirun(2, "-m", "epmoe", "verify", "--words", "2", "--rounds", "2", EPMOE_DEVICE="sim")
    assert job.status == 0 and "PASS  2 worlds of 2 rounds" in job.output, job.output


@pytest.mark.nightly
def test_check_compares_the_words_of_ranks_as_processes():
    job = mpirun(2, "-m", "epmoe", "check", "mpi_plain_kernels", "--only", "uneven ranks", EPMOE_DEVICE="sim")
    assert job.status == 0 and "PASS mpi_plain_kernels" in job.output, job.output
