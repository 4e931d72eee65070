"""Every decision record has the same lines, and names a machine, a date and a commit that exists."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = ["Chosen", "Measured", "How", "Why it stays", "Commit"]
RECORDS = [
    pytest.param(record, id=record.partition("\n")[0])
    for name in ("pairs", "rows", "host")
    for record in (ROOT / "benchmarks" / "notes" / f"{name}.md").read_text().split("\n## ")[1:]
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_says_what_was_chosen_and_measured(record):
    assert re.findall(r"^- ([\w ]+):", record, re.M) == LINES
    measured = record.partition("- Measured:")[2].partition("\n- How:")[0]
    assert re.search(r"H[12]00|not on GPUs", measured) and re.search(r"2026-\d\d-\d\d", measured)
    assert len(record.splitlines()) <= 17


def test_commits_exist():
    commits = [re.search(r"^- Commit: (\w{7})\s*$", r.values[0], re.M)[1] for r in RECORDS]
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if git.stdout.strip() != "false":
        pytest.skip("needs the whole history: git fetch --unshallow")
    found = subprocess.run(
        ["git", "-C", ROOT, "cat-file", "--batch-check"], input="\n".join(commits), capture_output=True, text=True
    )
    assert [line.split()[1] for line in found.stdout.splitlines()] == ["commit"] * len(commits)
