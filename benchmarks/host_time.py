"""Host time of calls, and the host's speed at that time: a fixed piece of Python is timed with each call.

The same call can take the same CPU up to 1.7 times as long for seconds at a time, for whatever reason. If the fixed
piece is slower by the same factor, the machine was slow. If it is not, the call itself was.
"""

import os
import time
from dataclasses import dataclass

import numpy as np

FAST = 10  # percentile of the pieces
SLOW = 1.3  # this many times as long is neither noise nor a call that leaves less in the caches


@dataclass(frozen=True)
class OfHost:
    """One phase's calls on one rank, in microseconds, medians. us: of a call. piece_us: of the fixed piece of Python."""

    us: float
    piece_us: float


class HostTime:
    """Collects the calls of each phase of a contender."""

    def __init__(self, phases):
        self._calls, self._pieces = {phase: [] for phase in phases}, {phase: [] for phase in phases}

    def add(self, phase, seconds):
        """Record how long a call took, and time the piece now."""
        self._calls[phase].append(1e6 * seconds)
        self._pieces[phase].append(time_piece())

    def of_phases(self):
        """{phase: OfHost}."""
        return {
            phase: OfHost(round(float(np.median(calls)), 1), round(float(np.median(self._pieces[phase])), 2))
            for phase, calls in self._calls.items()
        }


def time_piece():
    """Microseconds that the fixed piece of Python takes now."""
    begin = time.perf_counter()
    sum(i for i in range(40))
    return 1e6 * (time.perf_counter() - begin)


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
