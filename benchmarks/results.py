"""Files of results: date, machine, versions, the link, and the rows."""

import json
from pathlib import Path

HERE = Path(__file__).parent / "results"


def write(record, file=None):
    """Write a record; the name without a file says date and machine. Returns the path."""
    if file is None:
        stamp = record["date"].replace(":", "").replace("+0000", "Z")
        file = HERE / f"{stamp}-{record['n_ranks']}-ranks.json"
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    return file


def read(file):
    """The record of a file."""
    return json.loads(Path(file).read_text())
