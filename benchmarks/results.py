"""Files of results: date, machine, versions, commit, the link, the rows. `python -m benchmarks merge` joins them."""

import json
from pathlib import Path

from benchmarks import peers, shapes
from epmoe_ref.errors import EPValueError

HERE = Path(__file__).parent / "results"
OF_A_PART = ("date", "commit", "command", "link_gbps", "compiling_seconds", "seconds")


def path(record, file=None):
    """The file for a record: the given one, or one named after date and machine."""
    stamp = record["date"].replace(":", "").replace("+0000", "Z")
    return Path(file) if file else HERE / f"{stamp}-{record['n_ranks']}-ranks.json"


def write(record, file):
    """Write a record completely or not at all."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(_text(record))
    part.replace(file)


def _text(record):
    """JSON with a line for each row, so that a diff of two files shows which rows differ."""
    lists = [name for name in ("rows", "loop") if name in record]
    text = json.dumps(record | {name: [] for name in lists}, indent=1)
    for name in lists:
        lines = "".join(f"\n  {json.dumps(r)}," for r in record[name]).removesuffix(",")
        text = text.replace(f'\n "{name}": []', f'\n "{name}": [{lines}\n ]', 1)
    return text + "\n"


def read(file):
    """The record in a file. Raises EPValueError if the file is something else."""
    try:
        record = json.loads(Path(file).read_text())
    except ValueError:
        record = None
    if not isinstance(record, dict) or not {"device", "n_ranks", "world", "rows", "not_run"} <= set(record):
        raise EPValueError(f"{file} is not a file of results of `python -m benchmarks` (--json FILE)")
    return record


def merged(records):
    """One record of several runs on like machines. If several rows or loops measure the same thing, the last one counts.

    `parts` holds the values that differ between the runs. Raises EPValueError for runs that cannot be compared.
    """
    whole = dict(records[-1])
    for name in ("device", "n_ranks", "world"):
        found = {record[name] for record in records}
        if len(found) > 1:
            raise EPValueError(f"results with different {name} cannot be merged: {', '.join(map(str, sorted(found)))}")
    rows, failures = {}, {}
    for record in records:
        for r in record["rows"]:
            rows[key(r)] = r
        for failure in record["not_run"]:
            failures[failure["kernels"], failure["shape"], failure["sms"]] = failure
    measured = {(r["kernels"], str_of(r), r["sms"]) for r in rows.values()}
    whole["rows"] = list(rows.values())
    loops = {
        (r["kernels"], r["arrays"], r["tokens"], r["hidden"], r["experts"], r["top_k"]): r
        for record in records
        for r in record.get("loop", [])
    }
    if loops:
        whole["loop"] = list(loops.values())
        measured |= {(name, str(shapes.Shape(*sizes)), None) for name, _, *sizes in loops}
    whole["not_run"] = [f for name, f in failures.items() if name not in measured]
    whole["parts"] = [
        part for record in records for part in record.get("parts", [{name: record.get(name) for name in OF_A_PART}])
    ]
    return whole


def commits(record):
    """The commits of the runs in a merged record, as words."""
    *first, last = dict.fromkeys((part["commit"] or "unknown")[:7] for part in record["parts"])
    return f"{', '.join(first)} and {last}" if first else last


def key(row):
    """Two rows with the same key measure the same thing."""
    return row["kernels"], row["phase"], str_of(row), row["graph"], row["sms"]


def str_of(row):
    """A row's shape as text."""
    return str(shapes.of_row(row))


def add_arguments(parser):
    """Add the options of merge."""
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files of results, the newest last")
    parser.add_argument("--json", required=True, metavar="FILE", help="the file to write")


def run(args):
    """Merge the files. The exit status is 0."""
    whole = merged([read(file) for file in args.files])
    peers.annotate(whole)
    write(whole, args.json)
    print(f"written: {args.json}, {len(whole['rows'])} rows")
    return 0
