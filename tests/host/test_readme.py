"""README and docs say nothing untrue: code runs, paths, links, commands, options exist, and CI runs the commands."""

import argparse
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from epmoe.__main__ import COMMANDS, main
from epmoe.check import conformance

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXT = README.read_text()
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MARKDOWN = [
    *PAGES,
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
    ROOT / "epmoe" / "mutants" / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]


def blocks(language, text=TEXT):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "using.md"], ids=lambda page: page.name)
def test_the_python_blocks_run_in_order(page, capsys):
    names = {}
    text = page.read_text()
    assert blocks("python", text)
    for block in blocks("python", text):
        exec(compile(block, page.name, "exec"), names)
    assert [len(a) for a in names["out"]] == [len(x) for x in names["x"]]
    assert page != README or capsys.readouterr().out == "(8, 64)\n"


def test_the_implementation_shown_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conformance, "RUNS", 1)  # it is the reference
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    assert main(["check", "mine:Mine", "--quiet"]) == 0
    assert "18 of 53 cases served" in capsys.readouterr().out


def test_the_readme_is_short_and_its_programs_fit_on_a_screen():
    assert len(README.read_bytes()) <= 9000
    assert all(len(block.splitlines()) <= 15 for block in blocks("python"))


def test_the_workflow_to_paste_runs_the_check_and_uploads_junit():
    (block,) = blocks("yaml", (ROOT / "docs" / "checking.md").read_text())
    steps = re.findall(r"^      - (?:run|uses): (.*)$", block, re.M)
    assert "epmoe check mine:Mine" in steps and block.count("epmoe.xml") == 2 and "\t" not in block
    assert "python -m pytest --epmoe-check mine:Mine --junitxml epmoe.xml" in steps


def test_ci_runs_the_two_commands():
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111, "executable"
    program = re.search(r"awk (-v n=\"\$1\") ('.*?') README.md", run.read_text())
    for n, needed in ((1, "epmoe"), (2, "-m pytest")):
        done = subprocess.run(
            ["awk", "-v", f"n={n}", program[2].strip("'"), "README.md"],
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=True,
        )
        assert done.stdout == blocks("sh")[n - 1] and re.search(rf"{needed}( -n auto)?$", done.stdout.strip())


def commands():
    """{what follows `epmoe` in a command of a page}, without the comment behind it."""
    for page in PAGES:
        text = page.read_text()
        shown = [*re.findall(r"`([^`\n]+)`", text), *"".join(blocks("sh", text)).splitlines()]
        for command in shown:
            begins = r"(?:^|-m |\bbin/|&& |sim |gpu |[A-Z]=\S+ )epmoe"
            yield from (found[1].strip() for found in re.finditer(begins + r"( [^#&]*|$)", command.strip()))


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_the_commands_and_their_options_exist(command):
    words = command.split()
    name = words.pop(0) if words and not words[0].startswith("--") else "verify"
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[name][0]).add_arguments(parser)
    assert {word for word in words if word.startswith("--")} <= set(parser._option_string_actions)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_command_is_called_epmoe(page):
    """Only launchers, which start Python, name the module."""
    assert not re.findall(r"(?<!mpi4py )(?<!torchrun )python -m epmoe(?![.\w])", page.read_text())


def test_the_paths_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("|") and "---" not in row]
    assert len(rows) > 8
    for cell in (cell for row in rows for cell in row.split("|")[1:-1]):
        folder = None
        for name in re.findall(r"`([\w./]+(?:\.py|/))`", cell):
            path = ROOT / name if "/" in name else folder / name
            assert path.exists(), name
            folder = path.parent


def prose(page):
    """A page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page):
    """The names by which a page's headings are linked to."""
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in set(anchors(target)), link


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_is_left_unfinished(page):
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.M)


def test_every_page_is_linked_from_the_readme():
    assert all(f"](docs/{page.name})" in TEXT for page in PAGES if page != README)


def test_the_formats_are_the_ones_there_are():
    from epmoe_ref.config import TOKEN_FORMATS

    text = (ROOT / "docs" / "using.md").read_text()
    sentence = text[text.index("- **Formats.**") :].partition("\n- ")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) >= set(TOKEN_FORMATS)
