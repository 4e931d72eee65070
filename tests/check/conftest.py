import shlex
import subprocess
from pathlib import Path

import pytest

from epmoe.__main__ import main
from epmoe.check import conformance


@pytest.fixture
def each_case_once(monkeypatch):
    """Equal cases are not run again: only implementations that depend on a world before need that."""
    monkeypatch.setattr(conformance, "RUNS", 1)


@pytest.fixture
def told(capsys, monkeypatch):
    """Function: runs a command of epmoe in this process and folder; returns what subprocess.run does."""
    monkeypatch.chdir(Path(__file__).parent)

    def called(command):
        try:
            status = main(shlex.split(command))
        except SystemExit as end:  # argparse
            status = end.code
        out = capsys.readouterr()
        return subprocess.CompletedProcess(command, status, out.out, out.err)

    return called


@pytest.fixture
def run_pytest(tmp_path, capsys, monkeypatch):
    """Function: runs pytest with the plugin in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        plugins = "-p", "epmoe.check.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler"
        status = pytest.main([*plugins, "--import-mode=importlib", *arguments])
        out = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, out.out, out.err)

    return run
