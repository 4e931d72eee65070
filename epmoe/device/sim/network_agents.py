"""SHMEM in the race detector. Every thread has an agent, with its own clock, that performs its puts and signals.

The agent has the knowledge that its thread had when it sent. It reads the source and writes the target. A thread that
does not know that the agent has finished races with it. shmem_quiet tells its thread, and synchronisation passes it on.
"""

import numpy as np

from . import race_report
from .actors import SYS, Actor


class NetworkAgents:
    """The detector's side of the SHMEM intrinsics. `agents`: clock index of the first agent, 0 without agents."""

    agents = 0

    def agent(self, a, word):
        """An actor for one operation of actor a. It has a's knowledge and the agent's next time."""
        idx = self.agents + a.idx
        self.agent_time[a.idx] += 1
        e = Actor(idx, a.snapshot(), a.block, a.tid, word)
        e.time = int(self.agent_time[a.idx])
        e.proxy, e.fences = e.base, dict(a.fences)
        a.time += 1  # a's later operations come after it
        return e

    def put(self, a, source, target, nbytes, source_span, target_span, frame):
        """One lane's part of a put. Returns the agent's time."""
        e = self.agent(a, "shmem_put_nbi_warp")
        self.bulk(e, source, nbytes, False, e.word, frame, source_span)
        self.bulk(e, target, nbytes, True, e.word, frame, target_span)
        self.last_put[a.idx] = e.time
        return e.time

    def signal(self, a, ordered):
        """A signal is sent. `ordered`: the agent's time up to which a fence orders its puts before the signal, or 0."""
        e = self.agent(a, "shmem_signal_set")
        for scope, (clock, proxy) in e.fences.items() if ordered else ():
            clock = clock.copy()
            clock[e.idx] = max(clock[e.idx], ordered)
            e.fences[scope] = clock, proxy
        return e

    def signal_arrives(self, e, address, span, place, before, after):
        """The store in the destination's memory. An acquire of it learns all that its thread's last fence covers."""
        self.strong(e, address, 8, False, True, SYS, False, False, e.word, place, span, before, after)

    def quiet(self, a):
        """a's agent has finished everything."""
        clock = a.base.copy()
        clock[self.agents + a.idx] = self.agent_time[a.idx]
        a.learn(clock)

    def thread_ends(self, a):
        super().thread_ends(a)
        if self.agents and self.last_put.get(a.idx, 0) > a.known[self.agents + a.idx]:
            self.report(race_report.unfinished_put(a))

    def new_agents(self, n):
        """Give n actors without agents indices in the clocks. Returns the length of clocks with agents."""
        self.agents, self.agent_time, self.last_put = n, np.zeros(n, np.int32), {}
        return 2 * n
