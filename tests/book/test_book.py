"""The book and the notebooks that docs/book/build.py makes of the lesson files.

Needs the extra `book`; the tests marked browser need `browser` too, and npm's pyodide for Python inside the page.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from epmoe.lessons import FILES
from epmoe.lessons.telling import cells
from epmoe.museum import FILES as EXHIBITS
from epmoe.museum import exhibit
from epmoe.puzzles import FILES as PUZZLES
from epmoe.puzzles import puzzle

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "book"))

import build  # noqa: E402
import chapters  # noqa: E402
import more_pages  # noqa: E402
import run_notebooks  # noqa: E402

ARTICLE = '''"""Lesson 0: A title."""

# Text with a word_of_code, 2 ** 3 ** 4, and `a ** b`.

numbers = [1, 2]
print(sum(numbers))

# Predict: what comes next?
#
# ## Worked problems
#
# 1. How many?
#
# Answer: 2.

assert len(numbers) == 2
'''


@pytest.fixture
def article(tmp_path):
    file = tmp_path / "lesson0_article.py"
    file.write_text(ARTICLE)
    return file


def test_a_page_has_the_lesson_s_text_code_output_and_line_numbers(article):
    page = chapters.page(article)
    assert [cell.cell_type for cell in page.cells] == ["markdown", "markdown", "code", *["markdown"] * 4]
    assert r"2 \*\* 3 \*\* 4, and `a ** b`" in page.cells[1].source
    code = page.cells[2]
    assert code.metadata.first_line == 5
    assert code.source.splitlines() == ARTICLE.splitlines()[4:6]
    assert [output.text for output in code.outputs] == ["3\n"]
    assert page.cells[3].source.startswith("**Predict:**")
    assert "<details><summary>Answer</summary>\n\n2." in page.cells[-1].source
    assert "assert" not in page.cells[-1].source


def test_a_notebook_installs_first_and_has_no_output(article):
    notebook = chapters.notebook(0, article, "epmoe-0.2.0.whl")
    assert "%pip install -q epmoe-0.2.0.whl" in notebook.cells[1].source
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "epmoe lesson 0 --check" in notebook.cells[-3].source


@pytest.mark.parametrize("number", FILES)
def test_all_code_of_a_lesson_is_in_its_notebook(number):
    notebook = chapters.notebook(number, FILES[number])
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    shown = [c[2] for c in cells(FILES[number].read_text()) if c[0] == "code"]
    assert sources[1 : 1 + len(shown)] == ["\n".join(lines) for lines in shown]


def test_tables_and_formulas_keep_their_columns_and_lists_stay_lists(article):
    article.write_text(ARTICLE + "\n# Two words:\n#\n#   a * b   x\n#   c       y\n#\n#   1. a list\n#   2. of two\n")
    text = chapters.page(article).cells[-1].source
    assert text == "Two words:\n\n```text\na * b   x\nc       y\n```\n\n  1. a list\n  2. of two"


def test_lessons_over_the_simulator_do_not_claim_to_run_in_a_page():
    runs = {n for n, file in FILES.items() if chapters.in_the_browser(file.read_text())}
    assert 1 in runs and not runs & {3, 4, 5}


def test_a_notebook_runs_and_a_cell_that_raises_is_named(tmp_path, article, capsys):
    book = chapters.notebook(0, article)
    book.cells = book.cells[:5]  # "lesson 0" is no lesson
    (tmp_path / "good.ipynb").write_text(json.dumps(book))
    book.cells[2].cell_type, book.cells[2]["source"] = "code", "raise ValueError('broken')"
    book.cells[2].update(outputs=[], execution_count=None)
    (tmp_path / "bad.ipynb").write_text(json.dumps(book))
    assert run_notebooks.main([str(tmp_path / "good.ipynb")]) == 0
    assert run_notebooks.main([str(tmp_path / "bad.ipynb")]) == 1
    assert "bad.ipynb  FAILED" in capsys.readouterr().out
    (tmp_path / "none").mkdir()
    assert run_notebooks.main([str(tmp_path / "none")]) == 1


def test_the_book_is_built_without_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(exhibit, "SCHEDULES", 3)
    html = build.build(tmp_path, [1], pictures=False)
    page = (html / "lesson1.html").read_text()
    first = next(c[1] for c in cells(FILES[1].read_text()) if c[0] == "code")
    assert re.search(rf'<span class="linenos"> *{first}</span>', page)
    assert 'id="run-in-page"' in page
    assert (html / "notebooks" / "lesson1.ipynb").exists()
    assert (html / "_static" / "epmoe_ref.zip").exists()


@pytest.fixture(scope="module")
def pyodide(tmp_path_factory):
    """The folder of npm's pyodide, which has no packages."""
    if os.environ.get("EPMOE_PYODIDE"):
        return Path(os.environ["EPMOE_PYODIDE"])
    folder = tmp_path_factory.mktemp("npm")
    version = build.PYODIDE.split("/v")[1].partition("/")[0]
    npm = [shutil.which("npm"), "install", "--silent", "--prefix", folder, f"pyodide@{version}"]
    subprocess.run(npm, check=True, timeout=110)
    return folder / "node_modules" / "pyodide"


@pytest.fixture
def served(tmp_path, pyodide, article, monkeypatch):
    """The address of a book with one chapter, served with Pyodide."""
    monkeypatch.setattr(build, "FILES", {0: article})
    html = build.build(tmp_path / "book", pyodide="pyodide/", pictures=False)
    shutil.copytree(pyodide, html / "pyodide")
    handler = partial(_Quiet, directory=str(html))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.browser
def test_code_runs_inside_the_page_and_can_be_changed(served):
    from playwright.sync_api import sync_playwright

    path = os.environ.get("EPMOE_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{served}/lesson0.html")
        page.get_by_role("button", name="Run").first.click()
        page.wait_for_function("document.querySelector('.run-output')?.textContent === '3\\n'", timeout=60000)
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Python code").fill("print(6 * 7); 1 / 0")
        page.get_by_role("button", name="Run").first.click()
        page.wait_for_function("document.querySelector('.run-output')?.textContent.includes('ZeroDivisionError')")
        assert page.locator(".run-output").inner_text().startswith("42\n")
        browser.close()


def test_the_museum_shows_code_without_its_repair():
    for file in EXHIBITS.values():
        blocks = list(more_pages._blocks(exhibit.Exhibit(file).code))
        assert blocks and not any("REPAIR" in block for block in blocks)
        for block in blocks:
            first = int(re.search(r":lineno-start: (\d+)", block)[1])
            line = block.split("\n\n", 1)[1].splitlines()[0]
            assert file.read_text().splitlines()[first - 1] == line


def test_every_puzzle_is_in_the_notebook_and_on_the_page():
    notebook = json.dumps(more_pages.puzzles_notebook("epmoe"))
    page = more_pages.puzzles()
    for number in PUZZLES:
        assert f"epmoe puzzle {number} --check" in notebook
        assert puzzle(number).title in page
