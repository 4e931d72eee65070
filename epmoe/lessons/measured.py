"""Benchmark results: rows of the files in the repository's benchmarks/results, newest first."""

import json
from pathlib import Path

import epmoe

FOLDER = Path(epmoe.__file__).resolve().parents[1] / "benchmarks" / "results"
SHAPE = dict(hidden=7168, experts=256, top_k=8, routing="uniform")


class Measured:
    """Rows for one number of GPUs, the newest of each kind.

    n_ranks, device: of the machine. date, link_gbps: of the newest file.
    """

    def __init__(self, records):
        newest = records[-1]
        self.n_ranks, self.device, self.date = newest["n_ranks"], newest["device"], newest["date"]
        self.link_gbps = newest["link_gbps"]
        self._rows = {}
        for record in records:
            for row in record["rows"]:
                if row.get("sms") is None and all(row.get(name) == value for name, value in SHAPE.items()):
                    key = row["kernels"], row["phase"], row["tokens"], row["format"], row["graph"]
                    self._rows[key] = row

    def row(self, kernels, phase, tokens, format="bf16", graph=False):
        """The row of these kernels for this number of tokens a rank, or None. graph: replayed from a CUDA graph."""
        return self._rows.get((kernels, phase, tokens, format, graph))

    def tokens(self, kernels, phase):
        """The numbers of tokens for which there are rows."""
        return sorted(key[2] for key in self._rows if (*key[:2], *key[3:]) == (kernels, phase, "bf16", False))


def loop():
    """(rows, machine) of the tables that `python -m benchmarks loop` wrote on the machine of the newest, the newest row
    of each kind; ([], "") if there is none."""
    records = [r for r in _records() if r.get("loop") and "simulator" not in r["device"]]
    records.sort(key=lambda r: r["date"])
    machines = [(r["n_ranks"], r["device"].partition(",")[0]) for r in records]
    rows = {
        (row["kernels"], row["arrays"], row["tokens"]): row
        for r, machine in zip(records, machines)
        if machine == machines[-1]
        for row in r["loop"]
    }
    return list(rows.values()), " x ".join(map(str, machines[-1])) if machines else ""


def _records():
    return [json.loads(path.read_text()) for path in FOLDER.glob("*.json")] if FOLDER.is_dir() else []


def newest():
    """Measured for the largest number of GPUs; None without files (an installed package without its repository)."""
    records = [r for r in _records() if r.get("link_gbps") and isinstance(r.get("rows"), list) and "n_ranks" in r]
    records = [r for r in records if "simulator" not in r["device"]]
    records = [r for r in records if any(row["kernels"].startswith("pairs") for row in r["rows"])]
    if not records:
        return None
    most = max(r["n_ranks"] for r in records)
    return Measured(sorted((r for r in records if r["n_ranks"] == most), key=lambda r: r["date"]))
