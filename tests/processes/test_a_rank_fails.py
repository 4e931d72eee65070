"""A rank fails, in every phase: no rank waits longer than timeout + 2 s, and the job does not end with status 0.

p2p_world_size: 0 for one p2p world of all ranks, 1 for one a rank, with SHMEM between them.
"""

import re

import pytest
from mpirun import WITHOUT_SIGNALS, mpirun

TIMEOUT, GRACE = 1.0, 2.0
PHASES = dict(start="configuration", dispatch="dispatch_wait", combine="combine_wait", leave="leaving")
SLEEPING = "dispatch_async dispatch_wait dispatch combine_async combine_wait combine".split()
BY_DAY = [("kill", "dispatch", 0), ("return", "combine", 0), ("return", "leave", 0), ("raise", "combine", 1)]
CASES = [
    pytest.param(how, phase, size, marks=[] if (how, phase, size) in BY_DAY else pytest.mark.nightly)
    for how in ("return", "raise", "kill")
    for phase in PHASES
    for size in (0, 1)
    if size == 0
    or (how, phase) in (("return", "dispatch"), ("return", "combine"), ("raise", "combine"), ("kill", "dispatch"))
]


@pytest.mark.parametrize("how, phase, p2p_world_size", CASES)
def test_the_job_ends_with_an_error(how, phase, p2p_world_size):
    job = mpirun(2, "failing_program.py", how, phase, TIMEOUT, p2p_world_size)
    assert job.status != 0 and "rank 1 fails" in job.output, job.output
    assert ("raised on purpose" in job.output) == (how == "raise"), job.output
    for waited in job.said(r"waited ([\d.]+):"):
        assert float(waited) < TIMEOUT + GRACE, job.output
    if how == "return":  # the launcher sees no failure; the other ranks must notice
        said = job.said(r"rank 0 waited [\d.]+: rank 0, (\w+): (.*)")
        assert len(said) == 1 and said[0][0] == PHASES[phase], job.output
        missing = "src_rank 1 (3 of 3 experts: 0, 1, 2)"
        if phase in ("start", "leave"):
            missing = "rank 1 did not come"
        if phase == "combine" and p2p_world_size == 0:
            assert re.match(WITHOUT_SIGNALS, said[0][1])[1] == "1", job.output
        else:
            assert missing in said[0][1], job.output


@pytest.mark.nightly
@pytest.mark.parametrize("p2p_world_size, phases", [(0, SLEEPING), (1, ["dispatch_async", "combine"])])
def test_a_rank_that_oversleeps_is_named_and_all_can_go_on_after_a_reset(p2p_world_size, phases):
    job = mpirun(3, "sleeping_program.py", TIMEOUT, ",".join(phases), p2p_world_size)
    assert job.status == 0 and job.output.count("recovered every time") == 3, job.output
    for phase in phases:
        if phase == "combine_wait":  # waits for others; no rank waits for it
            assert len(job.said(rf"rank \d finished, sleeping before {phase}")) == 3, job.output
            continue
        waits = "dispatch_wait" if phase in ("dispatch_async", "dispatch") else "combine_wait"
        for rank in (0, 1):
            experts = ", ".join(str(3 * rank + e) for e in range(3))
            signals = rf"no signal from src_rank (2) \(3 of 3 experts: {experts}\)"
            says = WITHOUT_SIGNALS if phase == "combine" and p2p_world_size == 0 else signals
            waited = rf"rank {rank} waited ([\d.]+), sleeping before {phase}: rank {rank}, (\w+): "
            said = job.said(waited + says)
            assert len(said) == 1, job.output
            waited, where, source = said[0]
            assert where == waits and source == "2", job.output
            assert TIMEOUT <= float(waited) < TIMEOUT + GRACE, job.output
