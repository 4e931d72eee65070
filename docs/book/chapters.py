"""Turns the lesson files into notebooks: pages of the book, with outputs, and notebooks to run, without.

A lesson is a Python file that reads as an article (epmoe.lessons.telling). Here each piece of text becomes a
Markdown cell and each piece of code a code cell. A page's cells carry the output of a real run and the line of the
file they begin in, so that the lines that reports cite are the lines that the page shows.
"""

import contextlib
import io
import re
import textwrap

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from epmoe.lessons.telling import cells, plain_simulator, title

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
INSTALL = """\
# On a fresh machine this takes about a minute. Lessons run in the simulator, with or without a GPU.
import importlib.util, os
if importlib.util.find_spec("epmoe") is None:
    %pip install -q {wheel}
os.environ.update(EPMOE_DEVICE="sim", EPMOE_RACECHECK="0")"""
ANSWER = """\
## Answer the exercises here

The first cell writes a file with a hole for each exercise that asks for code. Fill the file in, then run the second
cell."""
ON_A_GPU = """\
## The same on a GPU

Without `EPMOE_DEVICE` the command takes the GPU, if there is one of compute capability 7.5 or more, and compiles the
project's kernels for it."""
FOLDED = """\
<details><summary>Answer</summary>

{answer}

</details>"""
# lines that are indented, but no list: formulas and tables, whose columns would be lost
TABLE = re.compile(r"(?<![^\n]\n)^  (?! *(\d+\.|-) ).*(\n  .*)*", re.MULTILINE)
CODE = ("code", "check")  # a check is code below an answer, which is not shown
# what Python inside a page cannot import: the simulator needs Numba and greenlets
NEEDS_THE_SIMULATOR = re.compile(r"^\s*(from|import) epmoe\b", re.MULTILINE)


def in_the_browser(source):
    """Whether a lesson needs only NumPy and epmoe_ref, so that Pyodide can run it inside the page."""
    shown = "\n".join(line for kind, *cell in cells(source) if kind == "code" for line in cell[1])
    return not NEEDS_THE_SIMULATOR.search(shown)


def page(file):
    """A notebook for the book: the lesson's cells with what they print, and the line that each begins in."""
    source = file.read_text(encoding="utf-8")
    out, names = [_heading(source)], {"__name__": "lesson", "__file__": str(file)}
    with plain_simulator():
        for kind, *cell in cells(source):
            if kind not in CODE:
                out.append(_markdown(kind, cell[0]))
                continue
            first, lines = cell
            heard = io.StringIO()
            with contextlib.redirect_stdout(heard):
                exec(compile("\n" * (first - 1) + "\n".join(lines), str(file), "exec"), names)
            if kind == "code":
                printed = [new_output("stream", text=text)] if (text := heard.getvalue()) else []
                metadata = {"first_line": first}
                out.append(new_code_cell("\n".join(lines), outputs=printed, metadata=metadata))
    return finished(out)


def notebook(number, file, wheel="epmoe"):
    """A notebook to run on a fresh machine: its first cell installs, its last ones judge answers and use a GPU."""
    source = file.read_text(encoding="utf-8")
    out = [_heading(source), new_code_cell(INSTALL.format(wheel=wheel))]
    for kind, *cell in cells(source):
        if kind == "code":
            out.append(new_code_cell("\n".join(cell[1])))
        elif kind not in CODE:
            out.append(_markdown(kind, cell[0]))
    out += [
        new_markdown_cell(ANSWER),
        new_code_cell(f"!test -e answer{number}.py || epmoe lesson {number} --start"),
        new_code_cell(f"!epmoe lesson {number} --check"),
        new_markdown_cell(ON_A_GPU),
        new_code_cell("!env -u EPMOE_DEVICE epmoe\nassert _exit_code == 0"),
    ]
    return finished(out)


def _heading(source):
    return new_markdown_cell("# " + title(source).rstrip("."))


def _markdown(kind, lines):
    text = TABLE.sub(_fenced, "\n".join(map(_line, lines)).strip("\n"))
    if kind == "predict":
        text = text.replace("Predict:", "**Predict:**", 1)
    elif kind == "answer":
        text = FOLDED.format(answer=text.removeprefix("Answer: "))
    return new_markdown_cell(text)


def _fenced(table):
    return f"```text\n{textwrap.dedent(table[0])}\n```"


def _line(line):
    """A line of text whose stars stay stars; what is indented or between backquotes is left as it is."""
    if line.startswith("  "):
        return line
    return re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", line)


def finished(out):
    """A valid notebook of cells. Their ids are their numbers: the same lessons make the same file."""
    for i, cell in enumerate(out):
        cell["id"] = f"cell-{i}"
    book = new_notebook(cells=out, metadata={"kernelspec": KERNEL})
    nbformat.validate(book)
    return book
