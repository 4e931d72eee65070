"""One rank a process on GPUs, as many as there are (one GPU: two ranks share it): results, timeouts, recovery."""

import re
from importlib.util import find_spec

import pytest
from mpirun import WITHOUT_SIGNALS, mpirun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
TIMEOUT, GRACE = 3.0, 2.0
PHASES = ("dispatch_async", "dispatch_wait", "dispatch", "combine_async", "combine_wait", "combine")


@pytest.fixture(scope="module")
def n_ranks():
    from epmoe.worlds.ipc_memory import gpu_count

    return max(2, min(gpu_count(), 8))


@pytest.mark.parametrize("kind", ["fused", "split"])
def test_every_rank_has_the_reference_s_results_round_after_round(n_ranks, kind):
    job = mpirun(n_ranks, "rounds_program.py", kind, 20, limit=300)
    assert job.status == 0 and len(job.said(r"rank \d of \d equal")) == n_ranks, job.output


@pytest.mark.parametrize("option", ["--fused", "--shared-expert", "--skip-a2a"])
def test_verify_runs_on_the_gpus(n_ranks, option):
    job = mpirun(n_ranks, "-m", "epmoe", "verify", option, "--format", "fp8_blockwise", limit=300)
    assert job.status == 0 and "PASS" in job.output and "multiprocessors" in job.output, job.output


@pytest.mark.parametrize("p2p_world_size", [0, 1])
def test_a_rank_that_oversleeps_is_named_and_all_can_go_on_after_a_reset(n_ranks, p2p_world_size):
    job = mpirun(n_ranks, "sleeping_program.py", TIMEOUT, ",".join(PHASES), p2p_world_size, limit=300)
    if not can_run(job, p2p_world_size):
        return
    assert job.status == 0 and job.output.count("recovered every time") == n_ranks, job.output
    for rank in range(n_ranks - 1):
        for phase in PHASES[:-2] + PHASES[-1:]:  # no rank waits for combine_wait
            says = WITHOUT_SIGNALS if phase == "combine" and not p2p_world_size else r"no signal from src_rank (\d) "
            said = job.said(rf"rank {rank} waited ([\d.]+), sleeping before {phase}: rank {rank}, \w+: " + says)
            assert [source for _, source in said] == [str(n_ranks - 1)], job.output
            assert TIMEOUT <= float(said[0][0]) < TIMEOUT + GRACE, job.output


@pytest.mark.parametrize("p2p_world_size", [0, 1])
@pytest.mark.parametrize("how", ["return", "raise", "kill"])
def test_the_job_ends_with_an_error(n_ranks, how, p2p_world_size):
    job = mpirun(n_ranks, "failing_program.py", how, "combine", TIMEOUT, p2p_world_size, limit=300)
    if not can_run(job, p2p_world_size):
        return
    assert job.status != 0 and f"rank {n_ranks - 1} fails" in job.output, job.output
    assert all(float(waited) < TIMEOUT + GRACE for waited in job.said(r"waited ([\d.]+):")), job.output


def can_run(job, p2p_world_size):
    """Whether the job could begin; between p2p worlds it needs NVSHMEM, and says so."""
    if not p2p_world_size or find_spec("nvshmem"):
        return True
    assert job.status != 0 and re.search(r"pip install -e '\S+\[shmem\]'", job.output), job.output
    return False


def test_ranks_must_agree_on_the_configuration(n_ranks):
    job = mpirun(n_ranks, "differing_program.py", limit=300)
    assert job.status == 0 and job.output.count("EPConfig differs between ranks: combine_dtype") == n_ranks, job.output


def test_one_rank_compiles_for_all_and_the_second_start_compiles_nothing(n_ranks, tmp_path):
    first, second = (
        mpirun(n_ranks, "compiling_program.py", limit=300, EPMOE_CACHE_DIR=str(tmp_path), EPMOE_CACHE="1")
        for _ in range(2)
    )
    assert first.status == second.status == 0, first.output + second.output
    compiled = ",".join(first.said(r"compiled <(.+)>")).split(",")
    fused, split = ["combine", "dispatch", "tell_host"], ["async", "wait"]
    split = [f"{one}_{half}" for one in ("combine", "dispatch") for half in split]
    assert sorted(compiled) == sorted(fused + split), first.output
    assert len(list(tmp_path.glob("*.cubin"))) == len(compiled)
    assert second.said(r"compiled <(.*)>") == [""] * n_ranks, second.output
