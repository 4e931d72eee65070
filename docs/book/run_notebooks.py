"""Executes notebooks from first to last cell, as a reader would: python docs/book/run_notebooks.py FOLDER_OR_FILE ...

Each runs in an empty folder of its own. Exits with 1 if a cell raises, and names notebook, cell and error.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SECONDS = 300  # for one cell


def run(file):
    """The executed notebook; raises CellExecutionError."""
    book = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(book, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    return book


def main(names):
    here = Path(sys.executable).parent  # "!epmoe" in a cell is the command of this Python
    os.environ["PATH"] = f"{here}{os.pathsep}{os.environ['PATH']}"
    folders_or_files = [Path(name) for name in names]
    files = [f for p in folders_or_files for f in (sorted(p.glob("*.ipynb")) if p.is_dir() else [p])]
    failed = 0
    for file in files:
        start = time.monotonic()
        try:
            run(file)
        except CellExecutionError as error:
            failed += 1
            print(f"{file.name}  FAILED\n{error}")
        else:
            print(f"{file.name}  {time.monotonic() - start:.0f} s", flush=True)
    if not files:
        print("no notebooks there", file=sys.stderr)
    return 1 if failed or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
