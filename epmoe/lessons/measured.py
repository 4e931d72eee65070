"""Benchmark results: rows of the files in the repository's benchmarks/results, newest first."""

import json
from pathlib import Path

import epmoe

FOLDER = Path(epmoe.__file__).resolve().parents[1] / "benchmarks" / "results"
SHAPE = dict(hidden=7168, experts=256, top_k=8, routing="uniform", format="bf16")


class Measured:
    """Rows of bf16 for one number of GPUs, the newest of each kind.

    n_ranks, device: of the machine. date, link_gbps: of the newest file.
    """

    def __init__(self, records):
        newest = records[-1]
        self.n_ranks, self.device, self.date = newest["n_ranks"], newest["device"], newest["date"]
        self.link_gbps = newest["link_gbps"]
        self._rows = {
            (row["kernels"], row["phase"], row["tokens"], row["graph"]): row
            for record in records
            for row in record["rows"]
            if row.get("sms") is None and all(row.get(name) == value for name, value in SHAPE.items())
        }

    def row(self, kernels, phase, tokens, graph=False):
        """The row of these kernels for this number of tokens a rank, or None. graph: replayed from a CUDA graph."""
        return self._rows.get((kernels, phase, tokens, graph))

    def tokens(self, kernels, phase):
        """The numbers of tokens for which there are rows."""
        return sorted(tokens for *what, tokens, graph in self._rows if what == [kernels, phase] and not graph)


def newest():
    """Measured for the largest number of GPUs; None without files (an installed package without its repository)."""
    records = [
        r for r in _records() if r.get("link_gbps") and any(row["kernels"].startswith("pairs") for row in r["rows"])
    ]
    most = max((r["n_ranks"] for r in records), default=None)
    return Measured([r for r in records if r["n_ranks"] == most]) if records else None


def loop():
    """(rows, machine) of the tables that `python -m benchmarks loop` wrote on the machine of the newest, the newest row
    of each kind; ([], "") if there is none."""
    records = [r for r in _records() if r.get("loop")]
    machines = [f"{r['n_ranks']} x {r['device'].partition(',')[0]}" for r in records]
    rows = {
        (row["kernels"], row["arrays"], row["tokens"]): row
        for r, machine in zip(records, machines)
        if machine == machines[-1]
        for row in r["loop"]
    }
    return list(rows.values()), machines[-1] if machines else ""


def _records():
    """What the files of GPUs hold, the newest last."""
    records = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    return sorted((r for r in records if "simulator" not in r["device"]), key=lambda r: r["date"])
