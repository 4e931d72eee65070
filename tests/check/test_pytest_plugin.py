"""`pytest --epmoe-check module:Class`: one test a case, failures in words, bad names refused."""

import subprocess

import pytest


@pytest.fixture
def pytest_run(tmp_path, capsys, monkeypatch):
    """Function: runs pytest with the plugin in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        plugins = "-p", "epmoe.check.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler"
        status = pytest.main([*plugins, "--import-mode=importlib", *arguments])
        out = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, out.out, out.err)

    return run


def test_a_right_implementation_passes_case_by_case(pytest_run):
    arguments = "--epmoe-check", "numpy_world:NumpyWorld", "--epmoe-ranks", "2", "-v", "-k", "hot or slot"
    result = pytest_run(*arguments)
    assert result.returncode == 0, result.stdout
    assert "numpy_world:NumpyWorld[a hot expert] PASSED" in result.stdout
    assert "5 passed, 17 deselected" in result.stdout


def test_a_wrong_one_fails_in_words_and_beside_the_projects_own_tests(tmp_path, pytest_run):
    (tmp_path / "pytest.ini").write_text("[pytest]\nepmoe_check =\n    wrong_dispatches:SrcInfoSwapped\n")
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    result = pytest_run("--epmoe-ranks", "2", "-k", "uneven or mine")
    assert result.returncode == 1
    assert "the two columns are swapped: (token, k), not (k, token)" in result.stdout
    assert "raise Differs" not in result.stdout and "1 failed, 1 passed, " in result.stdout


def test_what_cannot_be_run_is_refused_in_words(pytest_run):
    for arguments, words in (
        (["nobody:Class"], "no module 'nobody'"),
        (["numpy_world:NumpyWorld", "--epmoe-ranks", "0"], "n_ranks=0 must be at least 1"),
    ):
        result = pytest_run("--epmoe-check", *arguments)
        assert result.returncode == 4 and words in result.stderr and "INTERNALERROR" not in result.stdout


def test_one_that_hangs_or_cannot_be_made_fails_in_words(pytest_run):
    arguments = "--epmoe-ranks", "2", "-k", "one and slot", "--epmoe-timeout", "2"
    names = "--epmoe-check", "hostile_worlds:Hangs", "--epmoe-check", "hostile_worlds:NoGpu"
    result = pytest_run(*arguments, *names)
    assert result.returncode == 1 and "2 failed" in result.stdout, result.stdout
    for words in (
        "combine of round 1 did not return within 2 s (--epmoe-timeout)",
        "hostile_worlds:NoGpu cannot be run: there is no GPU",
    ):
        assert words in result.stdout
    assert "Traceback" not in result.stdout


def test_without_the_option_nothing_is_added(tmp_path, pytest_run):
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    result = pytest_run()
    assert result.returncode == 0 and "1 passed" in result.stdout
