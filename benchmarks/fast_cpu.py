"""Keeps the loops' thread on a CPU that is fast now.

Two virtual CPUs can share a core. While another machine uses the other one, Python takes up to twice as long here, for
seconds at a time. A fixed piece of Python, sum(i for i in range(40)), says how fast a CPU is. Each rank tries its share
of the CPUs, until the piece takes no longer than SLOW times its fastest.
"""

import os
import statistics
import time

SAMPLES = 40
SLOW = 1.25


def piece_us():
    """Microseconds of the piece, a median."""
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        sum(i for i in range(40))
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


class FastCpu:
    """The CPUs of rank number i of n on this host. fastest_us: of the piece, so far. Only Linux can choose a CPU."""

    def __init__(self, i, n):
        self._all = []
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, range(os.cpu_count()))  # mpirun may have bound this rank to one
            self._all = sorted(os.sched_getaffinity(0))  # those that a container allows
        share = len(self._all) // n
        self._own = self._all[i * share : (i + 1) * share] or self._all
        self.fastest_us = piece_us()
        for cpu in self._own:
            self._piece_on([cpu])
        self.release()

    def release(self):
        """Let the system choose the CPU, also of threads that begin from now on."""
        if self._all:
            os.sched_setaffinity(0, self._all)

    def settle(self):
        """Move this thread to a CPU that is fast, if there is one; returns the piece's time there [us]."""
        took, tried = self.look(), 0
        while self.is_slow(took) and tried < len(self._own):
            self._own.append(self._own.pop(0))
            took, tried = self._piece_on(self._own[:1]), tried + 1
        return took

    def look(self):
        """The piece's time on the CPU of now [us]."""
        took = piece_us()
        self.fastest_us = min(self.fastest_us, took)
        return took

    def is_slow(self, took_us):
        """Whether the piece took longer than it should."""
        return took_us > SLOW * self.fastest_us

    def _piece_on(self, cpus):
        os.sched_setaffinity(0, cpus)
        return self.look()
