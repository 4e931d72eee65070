"""README says nothing untrue: its code runs, its paths and commands exist, and CI runs its commands."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


def test_the_python_blocks_run_in_order():
    names = {}
    assert len(blocks("python")) >= 2
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert [a.shape for a in names["out"]] == [(8, 64), (0, 64), (3, 64), (5, 64)]


def test_the_api_fits_on_a_screen():
    assert len(blocks("python")[0].splitlines()) <= 15


def test_ci_runs_the_two_commands():
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111, "executable"
    program = re.search(r"awk (-v n=\"\$1\") ('.*?') README.md", run.read_text())
    for n, needed in ((1, "-m epmoe"), (2, "-m pytest")):
        done = subprocess.run(["awk", "-v", f"n={n}", program[2].strip("'"), "README.md"], cwd=ROOT, text=True,
                              capture_output=True, check=True)
        assert done.stdout == blocks("sh")[n - 1] and re.search(rf"{needed}( -n auto)?$", done.stdout.strip())


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`python -m epmoe([^`]*)`", TEXT))))
def test_the_commands_exist(command):
    from epmoe.__main__ import COMMANDS

    word = command.split()[0] if command.split() else "verify"
    assert word.startswith("--") or word in COMMANDS


def test_the_paths_exist():
    table = TEXT[TEXT.index("## Where things are"):TEXT.index("## Limits")]
    for cells in (row.split("|")[1:-1] for row in table.splitlines() if row.startswith("|") and "---" not in row):
        for cell in cells:
            folder = None
            for name in re.findall(r"`([\w./]+(?:\.py|/))`", cell):
                path = ROOT / name if "/" in name else folder / name
                assert path.exists(), name
                folder = path.parent


def test_the_formats_are_the_ones_there_are():
    from epmoe_ref.config import TOKEN_FORMATS

    line = next(line for line in TEXT.splitlines() if "quantises on the way" in line)
    rest = TEXT[TEXT.index(line):].split(".\n")[0]
    assert set(re.findall(r"`(\w+)`", rest)) >= set(TOKEN_FORMATS)
