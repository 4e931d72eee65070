"""The four faults of public kernels, put into ours, are rejected; the document shows the reports."""

import re

import pytest

from epmoe.__main__ import main
from epmoe.mutants.public_faults import FAULTS, README, document, edited, repaired_is_silent, report

HOW = {
    "last signal found by a relaxed counter": "race",
    "completion counters over region B": "hang",
    "waiting region smaller than the grid": "bounds",
    "peer-written rows through the invariant load path": "race",
}


def without_numbers(text):
    """Lines, lanes and addresses differ from version to version and from run to run."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
@pytest.mark.by_day(1)  # the document has a run of each
def test_it_is_rejected_under_any_schedule(fault):
    assert [report(fault, seed)[0] for seed in range(3)] == [HOW[fault.name]] * 3


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.repair], ids=lambda f: f.name)
def test_repaired_it_is_silent(fault, tonight):
    assert repaired_is_silent(fault, seeds=3 if tonight else 1)


def test_an_edit_that_does_not_fit_the_kernels_is_refused():
    with pytest.raises(ValueError, match="holds 'no such text' 0 times, not once"):
        edited((("wait.py", "no such text", ""),))


def test_the_command_shows_the_reports_within_the_terminal(capsys):
    assert main(["mutants", "--faults"]) == 0
    said = capsys.readouterr().out
    assert all(fault.name in said for fault in FAULTS) and max(map(len, said.splitlines())) <= 80


def test_the_document_shows_the_reports():
    """After a change of the kernels: epmoe mutants --faults --write"""
    assert without_numbers(README.read_text()) == without_numbers(document())
