"""The program of docs/several_gpus.md runs unchanged: on GPUs its experts are a @cuda.jit kernel."""

import re

import pytest
from mpirun import ROOT, mpirun


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n_ranks", [2, pytest.param(1, marks=pytest.mark.gpu)])
def test_the_program_runs(n_ranks, tmp_path):
    (program,) = [
        block
        for block in re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "several_gpus.md").read_text(), re.M | re.S)
        if "MPIWorld()" in block
    ]
    file = tmp_path / "program.py"
    # combine gives the sum of two experts' rows, each half of (expert + 1) times the token
    file.write_text(
        program
        + """
    local = ids % cfg.n_local_experts + 1
    sums = x.astype(np.float32) * local.mean(1, keepdims=True, dtype=np.float32)
    got = np.asarray(out.numpy() if hasattr(out, "numpy") else out).astype(np.float32)
    assert np.allclose(got, sums, rtol=2 ** -7)
"""
    )
    job = mpirun(n_ranks, file.as_posix(), limit=180)  # on a GPU it compiles
    assert job.status == 0 and len(job.said(r"rank \d: \d+ rows received, 5 tokens combined")) == n_ranks, job.output
