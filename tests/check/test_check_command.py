"""`epmoe check`: exit codes, output, and one rank a process under mpirun."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numpy_world import NumpyWorld

from epmoe.check import check
from epmoe.check.adapters import ADAPTERS
from epmoe.check.implementation import load
from epmoe_ref.errors import EPValueError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(command, launcher=(), python=("-m", "epmoe")):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    return subprocess.run(
        [*launcher, sys.executable, *python, *shlex.split(command)],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=environment,
        timeout=100,
    )


def run_ranks(command, python=("-m", "mpi4py", "-m", "epmoe")):
    """As `run`, by two processes."""
    assert mpirun(), "no mpirun: pip install mpich"
    return run(command, (mpirun(), "-n", "2"), python)


def mpirun():
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def test_a_right_implementation_exits_with_0():
    result = run("check numpy_world:NumpyWorld --ranks 1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == (
        "PASS numpy_world:NumpyWorld: equal to the reference (26 of 52 cases served, 1 rank)"
    )
    assert "not served  nvfp4: token_format nvfp4" in result.stdout


def test_a_wrong_implementation_exits_with_1_and_says_why(told):
    result = told("check wrong_dispatches:OffByOne --ranks 2 --quiet --only uneven")
    assert result.returncode == 1
    assert "DIFFERS     uneven ranks" in result.stdout
    assert "off by one: every entry is one too large" in result.stdout
    assert "FAIL wrong_dispatches:OffByOne: 1 of 1 case differs" in result.stdout
    assert "not served" not in result.stdout


def test_long_lines_are_broken_for_a_terminal_but_commands_stay_whole(told, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = told("check wrong_dispatches:OffByOne --ranks 2 --only 'uneven ranks'").stdout.splitlines()
    again = "  again: epmoe check wrong_dispatches:OffByOne --only 'uneven ranks' --ranks 2"
    assert again in lines and all(len(line) <= 60 for line in lines if line != again)


def test_json_says_the_same(told):
    names = "wrong_dispatches:OffByOne numpy_world:NumpyWorld nobody:Class"
    result = told(f"check {names} --ranks 2 --json --only uneven")
    record = json.loads(result.stdout)
    wrong, right, nobody = record["implementations"]
    assert result.returncode == 2 and not record["passed"] and "no module 'nobody'" in nobody["verdict"]
    assert right["passed"] and [c["state"] for c in right["cases"]] == ["ok"] and right["n_ranks"] == 2
    [case] = wrong["cases"]
    assert (case["case"], case["state"], wrong["passed"]) == ("uneven ranks", "differs", False)
    assert {(d["what"], d["rank"]) for d in case["differences"]} == {("row_offsets", 0), ("row_offsets", 1)}
    assert all("off by one" in d["cause"] and "prefix sums" in d["rule"] for d in case["differences"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody", "must be module:Class"),
        *((name, "must be module:Class") for name in (":", ":x", "x:", "../x:Y", "a b:C", "json:dumps.x", ".")),
        ("nobody:Class", "no module 'nobody'"),
        ("numpy_world.py:NumpyWorld", "no module 'numpy_world.py': write numpy_world:NumpyWorld"),
        ("wrong_dispatches:Nobody", "has no 'Nobody'; its classes: SlotOrder, RankOrder, "),
        ("json:dumps", "must be a class derived from"),
    ],
)
def test_a_name_of_no_implementation_is_refused_in_a_line(name, words):
    with pytest.raises(EPValueError) as refused:
        load(name)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("per_rank_worlds:OneRank", "per_rank_worlds:OneRank has one rank a process: start it with `torchrun"),
        ("reference --ranks 2147483648", "must be at most 21845"),
        ("numpy_world:NumpyWorld kernelz --only 'one slot'", "'kernelz' must be module:Class"),
    ],
)
def test_what_cannot_be_run_exits_with_2(arguments, words, told):
    result = told(f"check {arguments}")
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr and not result.stdout


def test_nothing_checked_is_no_pass_and_what_cannot_be_is_said_once(told):
    result = told("check reference --only 'no such case'")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no case's name contains 'no such case'. There are:\n  uneven ranks\n" in result.stderr
    assert "contains 'unevn'; did you mean 'uneven ranks'? There are:\n" in told("check reference --only unevn").stderr
    result = told("check nobody:Class nobody:Class")
    assert result.returncode == 2 and result.stderr.count("epmoe check: ") == 1
    result = told("check --ranks 0")
    assert result.returncode == 2 and result.stderr.count("epmoe check: ") == 1


def test_what_every_case_says_is_said_once(told):
    lines = told("check wrong_dispatches:Raises --ranks 2 --quiet").stdout.splitlines()
    assert lines[0] == "DIFFERS     uneven ranks"
    assert lines[1].startswith("  dispatch raised IndexError: index 12 is out of bounds")
    again = "epmoe check wrong_dispatches:Raises --only 'uneven ranks' --ranks 2"
    assert lines[2] == f"  again: {again}"
    assert lines[3] == "DIFFERS     slots without an expert: as in 'uneven ranks'"
    assert told(again[6:] + " --quiet").stdout.splitlines()[:3] == lines[:3]


def test_an_implementation_that_serves_no_case_does_not_pass():
    class Nothing(NumpyWorld):
        token_formats = ()

    report = check(Nothing, n_ranks=2)
    assert not report.passed and "no case was run" in report.verdict


def test_every_adapter_can_be_loaded_without_its_library():
    for name in ADAPTERS:
        assert callable(load(name).make)


@pytest.mark.parametrize(
    "name",
    [
        "reference_rows",
        # .ci/run checks it from the wheel
        pytest.param("reference", marks=pytest.mark.nightly),
        # test_hybrid_is_checked has it too
        pytest.param("reference_hybrid", marks=pytest.mark.nightly),
    ],
)
def test_the_reference_passes_as_an_implementation(name):
    report = check(load(name), n_ranks=2)
    assert report.passed, str(report)
    assert len(report.run) == len(report.outcomes)


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        ("OneRank", 0, "PASS per_rank_worlds:OneRank: equal to the reference"),
        ("OneRankWrong", 1, "FAIL per_rank_worlds:OneRankWrong"),
    ],
)
@pytest.mark.by_day(1)
def test_one_rank_a_process(name, code, verdict):
    result = run_ranks(f"check per_rank_worlds:{name} --quiet --only uneven")
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stdout.count(verdict) == 1
    if code:
        assert "rank 1" in result.stdout and "the weights are applied twice" in result.stdout
        assert f"  again: mpirun -n 2 python -m mpi4py -m epmoe check per_rank_worlds:{name} --only " in result.stdout


@pytest.mark.nightly
def test_the_kernels_of_a_check_over_processes_are_known_beforehand(tonight):
    cases = ["mpi_kernels:an epilogue", "mpi_rows:one slot", "mpi_hybrid:more rows"]
    cases = cases if tonight else cases[1:2]
    program = "-m", "mpi4py", str(HERE / "launched_and_known.py")
    result = run_ranks(shlex.join(cases), program)
    assert result.returncode == 0, result.stdout + result.stderr
    said = [line.rpartition(": ")[0] for line in result.stdout.splitlines()]
    assert sorted(said) == sorted(2 * cases), result.stdout


def test_without_a_name_this_projects_kernels_are_checked(told):
    result = told("check --ranks 1 --only 'no tokens'")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checking kernels (1 of 4): 1 case; your own: epmoe check module:Class\n" in result.stdout
    assert "checking hybrid (4 of 4): 1 case\n" in result.stdout
    assert re.findall(r"^PASS (\w+): equal", result.stdout, re.M) == ["kernels", "fused_kernels", "hybrid"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("reference", "reference holds all ranks in one process, but 2 were started ("),
        ("per_rank_worlds:OneRank --ranks 3", "3 ranks are wanted, and 2 processes were started"),
    ],
)
def test_another_world_is_refused_under_mpirun(arguments, words):
    result = run_ranks(f"check {arguments} --only uneven")
    assert result.returncode == 2 and result.stdout == "" and words in result.stderr


@pytest.mark.nightly
def test_without_a_name_under_mpirun_each_process_is_a_rank():
    result = run_ranks("check --only uneven --quiet")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^PASS (\w+): equal", result.stdout, re.M) == ["mpi_kernels", "mpi_fused_kernels", "mpi_rows"]
    result = run_ranks("check mpi_hybrid --only overflow --quiet")
    assert result.returncode == 0, result.stdout + result.stderr
