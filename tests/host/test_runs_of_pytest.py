"""How this project's tests are run: without a GPU that was asked for, and under mpirun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import covering

from epmoe.doctor import find_mpirun

HERE = Path(__file__).parent
ONE_TEST = "test_habits.py"


def run(*options, launcher=()):
    pytest_quietly = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*launcher, *pytest_quietly, HERE / ONE_TEST, *options],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={name: v for name, v in os.environ.items() if name != "PYTEST_ADDOPTS"},
    )


def test_tests_for_a_gpu_without_one_end_with_4_and_a_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # where there is one
    done = run("-m", "gpu")
    said = done.stdout + done.stderr
    assert done.returncode == 4 and "the driver shows no GPU" in said, said
    assert "INTERNALERROR" not in said, said


@pytest.mark.nightly
def test_under_mpirun_each_rank_writes_a_junit_file_of_its_own(tmp_path):
    done = run(f"--junitxml={tmp_path / 'report.xml'}", launcher=(find_mpirun(), "-n", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = ["report.rank0.xml", "report.rank1.xml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == wanted
    assert all("<testcase" in path.read_text() for path in tmp_path.iterdir())


def test_by_day_each_value_of_a_parametrised_test_occurs_and_values_are_mixed():
    cases = [{("name", n), ("way", w), ("seed", s)} for n in range(4) for w in "ab" for s in (0, 1)]
    chosen = covering(cases, len(cases))
    assert len(chosen) == 4 and set().union(*(cases[i] for i in chosen)) == set().union(*cases)
    mixed = {frozenset(v for v in cases[i] if v[0] != "name") for i in chosen}
    assert len(mixed) == 4, "each way with each seed"
    assert covering(cases, 2) == chosen[:2]
    assert covering([{("n", i)} for i in range(9)], 3) == [0, 1, 2]
