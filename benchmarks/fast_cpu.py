"""Keeps the loops on a CPU that is fast now.

Two virtual CPUs can share a core. While another machine uses the other one, Python takes up to twice as long here, for
seconds at a time. A fixed piece of Python (host_time.py) says how fast a CPU is. The thread that calls is bound to the
fastest of its rank's share of the CPUs, and moves when that becomes slow. Other threads use all CPUs; mpirun may have
bound them to one. But autograd's threads follow: they wake up sooner on the CPU of the thread that waits.
"""

import contextlib
import os
import statistics

from benchmarks.host_time import time_piece

SAMPLES = 40
FAST = 1.1  # times the fastest piece: this CPU will do
SLOW = 1.25  # a loop on this CPU does not count


def piece_us():
    """Microseconds of the piece, a median."""
    return statistics.median(time_piece() for _ in range(SAMPLES))


class FastCpu:
    """The CPUs of rank number i of n on this host. Only Linux can choose a CPU.

    fastest_us: of the piece, so far. together: whether all threads of the process follow.
    """

    def __init__(self, i, n):
        self._before, self._all, self._own, self.together = None, [], [], False
        if hasattr(os, "sched_setaffinity"):
            self._before = os.sched_getaffinity(0)
            self._bind(range(os.cpu_count()), True)
            self._all = sorted(os.sched_getaffinity(0))  # those that a container allows
            share = len(self._all) // n
            self._own = self._all[i * share : (i + 1) * share] or list(self._all)
        self.fastest_us = piece_us()
        for cpu in self._own:
            self._piece_on(cpu)
        self.spread()

    def spread(self, together=False):
        """Let all threads use all CPUs, until settle()."""
        self.together = together
        if self._all:
            self._bind(self._all, True)

    def settle(self):
        """Bind this thread to a CPU that is fast, or else to the fastest; returns the piece's time there [us]."""
        tried = []
        for cpu in list(self._own):
            tried.append((self._piece_on(cpu), cpu))
            if tried[-1][0] <= FAST * self.fastest_us:
                break
            self._own.append(self._own.pop(0))  # it comes last next time
        if not tried:
            return self.look()
        took, cpu = min(tried)
        return took if cpu == tried[-1][1] else self._piece_on(cpu)

    def look(self):
        """The piece's time on the CPU of now [us]."""
        took = piece_us()
        self.fastest_us = min(self.fastest_us, took)
        return took

    def is_slow(self, took_us):
        """Whether the piece took too long for a loop to count."""
        return took_us > SLOW * self.fastest_us

    def release(self):
        """Bind all threads as they were before."""
        if self._before:
            self._bind(self._before, True)

    def _piece_on(self, cpu):
        self._bind([cpu], self.together)
        return self.look()

    def _bind(self, cpus, together):
        for thread in os.listdir("/proc/self/task") if together else [0]:  # 0: this one
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), cpus)
