"""`pytest --epmoe-check module:Class`: one test a case, failures in words, bad names refused."""

import re

import pytest
from test_check_command import run_ranks


def test_a_right_implementation_passes_case_by_case(run_pytest):
    arguments = "--epmoe-check", "numpy_world:NumpyWorld", "--epmoe-ranks", "2", "-v", "-k", "hot or slot"
    result = run_pytest(*arguments)
    assert result.returncode == 0, result.stdout
    assert "numpy_world:NumpyWorld[a hot expert] PASSED" in result.stdout
    assert "5 passed, 2 skipped, " in result.stdout


def test_a_wrong_one_fails_in_words_and_beside_the_projects_own_tests(tmp_path, run_pytest):
    (tmp_path / "pytest.ini").write_text("[pytest]\nepmoe_check =\n    wrong_dispatches:SrcInfoSwapped\n")
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    result = run_pytest("--epmoe-ranks", "2", "-k", "uneven or mine")
    assert result.returncode == 1
    assert "the two columns are swapped: (token, k), not (k, token)" in result.stdout
    assert "raise Differs" not in result.stdout and "1 failed, 1 passed, " in result.stdout
    assert "again: epmoe check wrong_dispatches:SrcInfoSwapped --only 'uneven ranks' --ranks 2" in result.stdout
    assert "::wrong_dispatches:SrcInfoSwapped[uneven ranks] - rank 0" in result.stdout


def test_what_cannot_be_run_is_refused_in_words(run_pytest):
    for arguments, words in (
        (["--epmoe-check", "nobody:Class"], "no module 'nobody'"),
        (["--epmoe-check", "numpy_world:NumpyWorld", "--epmoe-ranks", "0"], "n_ranks=0 must be at least 1"),
        (["--epmoe-timeout", "x"], "argument --epmoe-timeout: 'x' must be a positive number of seconds"),
        (["--epmoe-timeout", "nan"], "'nan' must be a positive number of seconds"),
        (
            ["--epmoe-timeout", "2", "--epmoe-ranks", "2"],
            "--epmoe-ranks, --epmoe-timeout: no meaning without --epmoe-check",
        ),
    ):
        result = run_pytest(*arguments)
        assert result.returncode == 4 and words in result.stderr and "INTERNALERROR" not in result.stdout


def test_one_that_hangs_or_cannot_be_made_fails_in_words(run_pytest):
    arguments = "--epmoe-ranks", "2", "-k", "one and slot", "--epmoe-timeout", "2"
    names = "--epmoe-check", "hostile_worlds:Hangs", "--epmoe-check", "hostile_worlds:NoGpu"
    result = run_pytest(*arguments, *names)
    assert result.returncode == 1 and "2 failed" in result.stdout, result.stdout
    for words in (
        "combine did not return within 2 s (--epmoe-timeout)",
        "hostile_worlds:NoGpu cannot be run: there is no GPU",
    ):
        assert words in result.stdout
    assert "Traceback" not in result.stdout


@pytest.mark.parametrize(
    "name, says", [("HangingRank", "did not return within 2 s (--ep"), ("RaisingRank", "raised V")]
)
def test_ranks_in_processes_end_together(name, says, tmp_path):
    options = f"-p epmoe.check.pytest_plugin --rootdir {tmp_path} {tmp_path} --epmoe-check hostile_worlds:{name}"
    result = run_ranks(f"{options} -k 'one and slot' --epmoe-timeout 2", ("-m", "mpi4py", "-m", "pytest"))
    says = f"rank [01]: epmoe check: hostile_worlds:{name}: case 'one slot': [a-z]+ of round 1 {re.escape(says)}"
    assert result.returncode == 1 and re.search(says, result.stderr), result.stdout + result.stderr


def test_without_the_option_nothing_is_added(tmp_path, run_pytest):
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    result = run_pytest()
    assert result.returncode == 0 and "1 passed" in result.stdout
