"""Measured times of our kernels on GPUs, a small table shipped with the package (measured.json).

`python -m epmoe.routing_report.measured benchmarks/results/FILE.json` prints the table of a benchmark's results.
"""

import json
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("measured.json")
SHAPE = dict(hidden=7168, experts=256, top_k=8, routing="uniform", graph=False, sms=None)
KERNELS = {"pairs fused": "pairs", "rows": "rows", "expert-major": "expert_major"}


def table_of(record, name):
    """The table for a file of results: where and when, and for each kernel, phase and format [bytes, us, floor_us]."""
    times = {}
    for row in record["rows"]:
        if row["kernels"] in KERNELS and row["phase"] in ("dispatch", "combine"):
            if all(row[key] == value for key, value in SHAPE.items()):
                key = f"{KERNELS[row['kernels']]} {row['phase']} {row['format']}"
                times.setdefault(key, []).append([row["bytes"], row["us"], row["floor_us"]])
    return {
        "from": name,
        "date": record["date"][:10],
        "commit": record["commit"][:7],
        "device": record["device"],
        "n_ranks": record["n_ranks"],
        "link_gbps": record["link_gbps"],
        "shape": SHAPE,
        "bytes_us_floor_us": {key: sorted(rows) for key, rows in sorted(times.items())},
    }


@lru_cache(1)
def table():
    """The shipped table."""
    return json.loads(FILE.read_text())


def machine(table):
    """Where a table was measured: "4 x NVIDIA H200"."""
    return f"{table['n_ranks']} x {table['device'].partition(',')[0]}"


def expected_us(interface, phase, token_format, busiest_bytes, floor_us):
    """Expected microseconds: this floor, plus the measured time beyond the floor for the same number of bytes.

    interface: pairs, rows, expert_major. phase: dispatch or combine. Between measured sizes, the time beyond the floor
    is interpolated over log(bytes). Above the largest size it grows in proportion to the floor. None if these kernels
    were not measured with this format.
    """
    short = {"bf16": "bf16", "fp8_blockwise": "fp8"}.get(token_format)
    rows = table()["bytes_us_floor_us"].get(f"{interface} {phase} {short}")
    if rows is None:
        return None
    nbytes, us, floors = np.array(rows, float).T
    if busiest_bytes >= nbytes[-1]:
        return float(floor_us * us[-1] / floors[-1])
    return float(floor_us + np.interp(np.log(max(busiest_bytes, 1)), np.log(nbytes), us - floors))


def as_text(table):
    """A table as JSON, one line for each kernel, phase and format."""
    head = {key: value for key, value in table.items() if key != "bytes_us_floor_us"}
    lines = (f"  {json.dumps(key)}: {json.dumps(rows)}" for key, rows in table["bytes_us_floor_us"].items())
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    return opening + ',\n "bytes_us_floor_us": {\n' + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    sys.stdout.write(as_text(table_of(json.loads(file.read_text()), file.name)))
