"""The targets of the kernels, and whether a run's rows reach them: microseconds, and ratios of two rows.

Set in November 2026 for H200s of one host, from the best published library there (peers.py) and from bare scatters of
the same rows. Times are of launches, without a graph.
"""

from dataclasses import replace
from typing import NamedTuple

from benchmarks import host_time, shapes

ZIPF_AT_MOST = 1.3  # times the time of uniform routing, for rows kernels
FEW_SMS, FEW_SMS_AT_LEAST = 24, 0.9  # of the speed with all SMs, for rows kernels
PLAIN_AT_MOST = 4  # times the time of the fast kernels of pairs
PLAIN_SHAPE = "4096x7168/256"
HOST_US = 12  # of a dispatch call, without a graph
HOST, OF_ALL = "host", "of all"  # the `what` of HOST_US's Verdict; the unit of FEW_SMS


class Target(NamedTuple):
    """The most microseconds for a phase, by number of ranks; None if there is no target."""

    kernels: str
    phase: str
    shape: str
    ranks4: float | None
    ranks2: float | None


class Verdict(NamedTuple):
    """One target and its result: kernels and shape, the quantity, its value, the aim, the unit.

    slow: for HOST, whether the host's CPU was slow while it was measured.
    """

    kernels: str
    shape: shapes.Shape
    what: str
    value: float
    wanted: float
    unit: str
    slow: bool = False

    @property
    def reached(self):
        """Whether the value is no worse than the aim: a speed must be at least the aim, everything else at most."""
        return self.value >= self.wanted if self.unit == OF_ALL else self.value <= self.wanted

    def __str__(self):
        return f"{self.kernels} {self.what} {self.shape}"


TARGETS = (
    Target("pairs fused", "dispatch", "128x7168/256", 42, 33),
    Target("pairs fused", "combine", "128x7168/256", 45, 36),
    Target("pairs fused", "dispatch", "128x7168/256:fp8", 28, 24),
    Target("pairs fused", "dispatch", "1x7168/256", 12, 12),
    Target("pairs fused", "combine", "1x7168/256", 12, 12),
    Target("pairs fused", "dispatch", "4096x7168/256", 1250, None),
    Target("rows", "dispatch", "4096x7168/256", 475, 195),
    Target("rows", "combine", "4096x7168/256", 500, 205),
    Target("rows", "dispatch", "4096x7168/256:fp8", 255, None),
    Target("rows", "dispatch", "128x7168/256", 27, 20),
    Target("rows", "combine", "128x7168/256", 30, 22),
    Target("rows", "dispatch", "1x7168/256", 12, None),
    Target("rows", "combine", "1x7168/256", 12, None),
    Target("expert-major", "dispatch", "4096x7168/256", 560, None),
)
WITH_RATIOS = ("4096x7168/256:zipf",)  # shapes that have only a ratio as target


def quick():
    """{kernels: [Shape that has a target]}."""
    wanted = {}
    for t in TARGETS:
        wanted.setdefault(t.kernels, {})[shapes.parse(t.shape)] = None
    for text in WITH_RATIOS:
        wanted["rows"][shapes.parse(text)] = None
    wanted["pairs plain"] = {shapes.parse(PLAIN_SHAPE): None}
    return {kernels: list(of_kernels) for kernels, of_kernels in wanted.items()}


def of_row(row, n_ranks):
    """The target of a row in microseconds, or None."""
    if row["sms"] is not None or n_ranks not in (2, 4):
        return None
    for t in TARGETS:
        if (t.kernels, t.phase) == (row["kernels"], row["phase"]) and shapes.parse(t.shape) == shapes.of_row(row):
            return t.ranks4 if n_ranks == 4 else t.ranks2
    return None


def verdicts(rows, n_ranks):
    """[Verdict] for everything in rows that has a target."""
    plain = {(r["kernels"], r["phase"], shapes.of_row(r), r["sms"]): r for r in rows if not r["graph"]}
    found, slowness = [], host_time.slowness(rows)
    for (kernels, phase, shape, sms), r in plain.items():
        us = of_row(r, n_ranks)
        if us is not None:
            found.append(Verdict(kernels, shape, phase, r["us"], us, "us"))
        if sms is None and phase == "dispatch" and kernels in ("pairs fused", "rows"):
            slow = slowness.get(r.get("piece_us"), 1) > host_time.SLOW
            found.append(Verdict(kernels, shape, HOST, r["host_us"], HOST_US, "us", slow))
        uniform = plain.get((kernels, phase, replace(shape, routing="uniform"), sms))
        if kernels == "rows" and phase != "cached" and sms is None and shape.routing == "zipf" and uniform:
            ratio = round(r["us"] / uniform["us"], 2)
            found.append(Verdict(kernels, shape, f"{phase}, against uniform", ratio, ZIPF_AT_MOST, "x"))
        fast = plain.get(("pairs fused", phase, shape, None))
        if kernels == "pairs plain" and sms is None and shape == shapes.parse(PLAIN_SHAPE) and fast:
            ratio = round(r["us"] / fast["us"], 2)
            found.append(Verdict(kernels, shape, f"{phase}, against fast", ratio, PLAIN_AT_MOST, "x"))
        all_sms = plain.get((kernels, phase, shape, None))
        if kernels == "rows" and phase != "cached" and sms == FEW_SMS and all_sms:
            speed = round(all_sms["us"] / r["us"], 3)
            found.append(Verdict(kernels, shape, f"{phase}, speed with {sms} SMs", speed, FEW_SMS_AT_LEAST, OF_ALL))
    return found


def report(record):
    """Lines of text: each target with its measurement; none on other machines, or if no row has a target."""
    found = verdicts(record["rows"], record["n_ranks"]) if "H200" in record["device"] else []
    if not found:
        return []
    width = max(len(str(v)) for v in found)
    lines = [f"{'target':{width}}  measured    wanted"]
    for v in found:
        lines.append(
            f"{v!s:{width}}  {v.value:8g}  {v.wanted:8g} {v.unit:6}  {'reached' if v.reached else 'MISSED'}"
            + ", on a slow CPU" * v.slow
        )
    missed = sum(not v.reached for v in found)
    return [*lines, f"{len(found) - missed} of {len(found)} reached"]
