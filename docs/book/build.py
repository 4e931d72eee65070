"""Builds the book and the notebooks from the lesson files: python docs/book/build.py [--out DIR] [--lessons 1 2 ...]

DIR (default docs/book/_build) gets html/, the book, and notebooks/, lessonN.ipynb to run on a fresh machine
if --wheel says where they find epmoe. Needs pip install -e '.[book]'.
"""

import argparse
import contextlib
import io
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import epmoe_ref
from epmoe import explain
from epmoe.lessons import FILES
from epmoe.lessons.telling import title
from epmoe.provenance import install

try:
    import myst_nb  # noqa: F401
    import nbformat
except ImportError as error:
    sys.exit(f"docs/book/build.py needs {error.name}: {install('book')}")

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
sys.path.insert(0, str(HERE))

import chapters  # noqa: E402 - beside this file, which is a program and no package
import more_pages  # noqa: E402

PYODIDE = "https://cdn.jsdelivr.net/pyodide/v314.0.7/full/"
RUNS_HERE = """\
Each piece of code below runs inside this page: select **Run**. The first time, Python is loaded from
`{address}` (about 15 MB). <a href="notebooks/lesson{n}.ipynb" download>Notebook</a> · in a terminal: `epmoe lesson {n}`

<div id="run-in-page" data-pyodide="{address}" data-reference="_static/epmoe_ref.zip"></div>"""
RUNS_ELSEWHERE = """\
The code of this page needs epmoe, which does not run inside a browser. To run it, take the
<a href="notebooks/lesson{n}.ipynb" download>notebook</a>, or type `epmoe lesson {n}` in a terminal."""
EXPLAINER = """\
# The picture

<a href="explain/explain.html">The page</a> shows every step and can be changed by hand. The last picture of each of its
chapters is below. The <a href="explain/explain-tape.html">tape</a> has every word of memory.
"""
# a link to a file of the repository that is no page of docs/
OUTSIDE = re.compile(r"\[([^]]*)\]\(\.\./[^)]*\)")


def build(out, numbers=None, *, pyodide=PYODIDE, wheel="epmoe", pictures=True):
    """Write out/notebooks and out/html; numbers: which lessons (default all). Returns the folder of the pages."""
    source, notebooks = out / "source", out / "notebooks"
    shutil.rmtree(source, ignore_errors=True)
    for folder in (source, notebooks):
        folder.mkdir(parents=True, exist_ok=True)
    files = {n: FILES[n] for n in numbers or FILES}
    for n, file in files.items():
        nbformat.write(chapters.notebook(n, file, wheel), notebooks / f"lesson{n}.ipynb")
        print(f"lesson {n}: {title(file.read_text(encoding='utf-8'))}", flush=True)
        nbformat.write(_page(n, file, pyodide), source / f"lesson{n}.ipynb")
    nbformat.write(more_pages.puzzles_notebook(wheel), notebooks / "puzzles.ipynb")
    (source / "puzzles.md").write_text(more_pages.puzzles(), encoding="utf-8")
    (source / "museum.md").write_text(more_pages.museum(), encoding="utf-8")
    _other_pages(source, files, pictures)
    shutil.copytree(HERE / "_static", source / "_static")
    _zip_of_the_reference(source / "_static" / "epmoe_ref.zip")
    shutil.copy(HERE / "conf.py", source)
    html = out / "html"
    shutil.rmtree(html, ignore_errors=True)
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(html)]
    subprocess.run([sys.executable, *command], check=True)
    shutil.copytree(notebooks, html / "notebooks", dirs_exist_ok=True)
    if pictures:
        shutil.copytree(source / "explain", html / "explain", dirs_exist_ok=True)
    return html


def _page(n, file, pyodide):
    book = chapters.page(file)
    runs = chapters.in_the_browser(file.read_text(encoding="utf-8"))
    note = (RUNS_HERE if runs else RUNS_ELSEWHERE).format(n=n, address=pyodide)
    book.cells.insert(1, nbformat.v4.new_markdown_cell(note, id="how-to-run"))
    return book


def _other_pages(source, files, pictures):
    more = sorted(DOCS.glob("*.md"))
    for file in more:
        text = OUTSIDE.sub(r"\1", file.read_text(encoding="utf-8"))
        (source / file.name).write_text(text, encoding="utf-8")
    (source / "explainer.md").write_text(
        _explainer(source) if pictures else EXPLAINER.splitlines()[0] + "\n", encoding="utf-8"
    )
    index = (HERE / "index.md").read_text(encoding="utf-8")
    index = index.replace("LESSONS", "\n".join(f"lesson{n}" for n in files))
    index = index.replace("MORE", "\n".join(file.stem for file in more))
    (source / "index.md").write_text(index, encoding="utf-8")


def _zip_of_the_reference(path):
    """epmoe_ref's sources, for Python inside a page."""
    package = Path(epmoe_ref.__file__).parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(package.rglob("*.py")):
            archive.write(file, file.relative_to(package.parent))


def _explainer(source):
    """The explainer beside the book, and a page of its chapters' pictures."""
    from epmoe.__main__ import main

    folder = source / "explain"
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        main(["explain", "--out", str(folder / "explain.html")])
        main(["explain", "--figures", str(folder / "figures")])
    return EXPLAINER + "".join(_chapters(folder / "figures"))


def _chapters(figures):
    """Each chapter's title and its picture at the last stage."""
    for text in sorted((Path(explain.__file__).parent / "page" / "text").glob("[0-9]*.md")):
        heading = text.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        stages = sorted(figures.glob(f"{text.stem}-*.svg"), key=lambda f: int(f.stem.split("-")[-1]))
        image = f"explain/figures/{stages[-1].name}"
        yield f'\n## {heading}\n\n<figure class="chapter"><img src="{image}" alt="{heading}"></figure>\n'


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "_build")
    parser.add_argument("--lessons", type=int, nargs="*", choices=sorted(FILES), metavar="N")
    parser.add_argument("--pyodide", default=PYODIDE, help="address of Pyodide (default %(default)s)")
    parser.add_argument("--wheel", default="epmoe", help="what notebooks install with pip: the address of a wheel")
    args = parser.parse_args(argv)
    html = build(args.out.resolve(), args.lessons, pyodide=args.pyodide, wheel=args.wheel)
    print(f"{html / 'index.html'}\n{args.out / 'notebooks'}")
    if args.wheel == "epmoe":
        print("notebooks need --wheel ADDRESS to run on a machine without epmoe")


if __name__ == "__main__":
    main()
