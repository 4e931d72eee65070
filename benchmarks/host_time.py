"""Host time of calls, and the host's speed at that time: a fixed piece of Python is timed with each call.

The same call can take the same CPU up to 1.7 times as long for seconds at a time, for whatever reason. If the fixed
piece is slower by the same factor, the machine was slow. If it is not, the call itself was.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FAST = 10  # percentile of the pieces
SLOW = 1.3  # this many times as long is neither noise nor a call that leaves less in the caches


@dataclass(frozen=True)
class OfHost:
    """One phase's calls on one rank, as medians, and the operating system's activity while all phases were measured.

    us: of a call. piece_us: of the fixed piece of Python. preempted: how often this thread lost its CPU to another.
    waited_us: total wait for a CPU. stolen_ms: time of this machine's CPUs taken by other machines, in ticks of 10.
    None: unknown here.
    """

    us: float
    piece_us: float
    preempted: int | None
    waited_us: float | None
    stolen_ms: int | None


class HostTime:
    """Collects the calls of each phase of a contender."""

    def __init__(self, phases):
        self._calls, self._pieces = {phase: [] for phase in phases}, {phase: [] for phase in phases}
        self._begin = _counts()

    def add(self, phase, seconds):
        """Record how long a call took, and time the piece now."""
        self._calls[phase].append(1e6 * seconds)
        begin = time.perf_counter()
        fixed_piece()
        self._pieces[phase].append(1e6 * (time.perf_counter() - begin))

    def of_phases(self):
        """{phase: OfHost}."""
        did = [
            None if before is None or after is None else after - before for before, after in zip(self._begin, _counts())
        ]
        return {
            phase: OfHost(round(float(np.median(calls)), 1), round(float(np.median(self._pieces[phase])), 2), *did)
            for phase, calls in self._calls.items()
        }


class _Entry:
    """The result of the piece."""

    def __init__(self, number, more):
        self.number, self.more = number, more


_NUMBERS = {i: 3 * i for i in range(16)}


def fixed_piece():
    """Some microseconds of Python like that of a call: objects, attributes, look-ups, calls, tuples."""
    made = [_Entry(i, (i, _NUMBERS[i])) for i in range(8)]
    return [one.number + one.more[1] for one in made if (one.number, one.more) != (16, ())]


def cpus():
    """How many CPUs this thread may run on. mpirun may bind a rank to one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def slowness(rows):
    """{piece_us: how many times as long as on a fast CPU}. rows: dicts, some perhaps without piece_us."""
    pieces = [row["piece_us"] for row in rows if row.get("piece_us")]
    return {us: round(float(us / np.percentile(pieces, FAST)), 1) for us in pieces}


def report(rows):
    """[a line on how fast the host was from case to case]. rows: dicts, as in the file."""
    pieces = sorted(row["piece_us"] for row in rows if row.get("piece_us"))
    if not pieces:
        return []
    low, middle, high = np.percentile(pieces, (10, 50, 90))
    return [
        f"host: a piece of Python that is always the same took {middle:.2f} us from case to case, 10th and 90th "
        f"percentile {low:.2f} and {high:.2f}; host us goes up and down with it"
    ]


def _counts():
    """Since the start: (times preempted, us waited for a CPU, ms stolen). None for values that are unknown here."""
    try:
        import resource

        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    except (ImportError, AttributeError):  # not Linux
        preempted = None
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) // 1000
    except (OSError, IndexError):
        waited = None
    try:
        ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
        stolen = 1000 * ticks // os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        stolen = None
    return preempted, waited, stolen
