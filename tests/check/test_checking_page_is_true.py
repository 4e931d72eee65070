"""docs/checking.md: its code runs and prints the output that the page shows."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import wrong_words

from epmoe.__main__ import main
from epmoe.check import check

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "checking.md").read_text()
MINE, RANDOM, SWAP = re.findall(r"^```python\n(# \w+\.py\n.*?)^```", TEXT, re.M | re.S)
DIFFERS, WORDS, REPORTS = re.findall(r"^```text\n(.*?)^```", TEXT, re.M | re.S)
EMPTY_SLOTS = re.compile(r"^ +weights = np\.where.*\n", re.M)


def printed(folder, *command, device):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "EPMOE_DEVICE": device, "EPMOE_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


def has_lines(text, shown):
    """Whether every line of a report on the page is a whole line of the text."""
    return set(shown.splitlines()) <= set(text.splitlines())


def test_the_implementation_passes_and_its_mistake_is_told_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    code, text = main(["check", "mine:Mine", "--quiet"]), capsys.readouterr().out
    assert code == 0 and text.startswith("PASS mine:Mine: equal to the reference (18 of 53 cases served, 4 ranks"), text
    assert EMPTY_SLOTS.search(MINE)
    (tmp_path / "wrong.py").write_text(EMPTY_SLOTS.sub("", MINE))
    code, text = main(["check", "wrong:Mine", "--only", "slots without"]), capsys.readouterr().out
    assert code == 1 and has_lines(text, DIFFERS), text


def test_the_inputs_of_a_case_are_got_as_shown():
    (lines,) = re.findall(r"^```python\n(from epmoe.check.cases.*?)^```", TEXT, re.M | re.S)
    exec(lines, names := {})
    assert len(names["case"].input_tokens(0)) == 4


def test_a_wrong_word_is_reported_as_shown():
    report = str(check(wrong_words.ReadyMissing, n_ranks=2, only="uneven"))
    assert has_lines(report, WORDS), report


@pytest.mark.nightly
def test_random_worlds_find_the_mistake_too(tmp_path):
    unshrunk = "deadline=None, phases=[__import__('hypothesis').Phase.generate]"  # shrinking takes ten seconds
    (tmp_path / "test_mine.py").write_text(RANDOM.replace("deadline=None", unshrunk))
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    (tmp_path / "mine.py").write_text(MINE)
    code, text = printed(tmp_path, *command, device="sim")
    assert code == 0, text
    (tmp_path / "mine.py").write_text(EMPTY_SLOTS.sub("", MINE) + "# of another length: no stale bytecode\n")
    code, text = printed(tmp_path, *command, device="sim")
    assert code == 1 and "output is nan" in text, text


def test_the_kernel_runs_and_its_reports_are_those_shown(tmp_path, capsys):
    (tmp_path / "swap.py").write_text(SWAP)
    runpy.run_path(str(tmp_path / "swap.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert has_lines(text, REPORTS), text


def test_the_kernel_is_one_for_gpus_too(tmp_path):
    (tmp_path / "swap.py").write_text(SWAP)
    code, text = printed(tmp_path, "-c", "import swap; print(swap.exchange(True).ptx())", device="gpu")
    assert code == 0, text
    assert "red.release.sys.global.add" in text and "ld.acquire.sys" in text
