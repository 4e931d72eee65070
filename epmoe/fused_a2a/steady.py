"""Calls of a Buffer that were made before with the same arguments: the fast way on a GPU, one rank a process.

In a steady state arrays come at addresses, and with shapes and types, that an earlier call had, and results get memory
that an earlier call's results had. What is checked and what is launched follows from these alone, as in
epmoe/steady_calls.py, so the launches of a call that took the general way start again. Everything else takes the
general way: host arrays, lists over ranks, calls that wait for the host, results that found no room in the heap, calls
that are captured into a CUDA graph.
"""

from contextlib import contextmanager

from epmoe import device
from epmoe.fused_a2a.heap import is_captured, place_of
from epmoe.steady_calls import UNSEEN, look

MAX_REMEMBERED = 1024


class _Known:
    """One call: the memory that it lends, how its results are made of that, its launches by where the memory is."""

    def __init__(self, memory, results):
        self.memory, self.results, self.launches = memory, results, {}


class SteadyCalls:
    """The remembered calls of one Buffer."""

    def __init__(self, buffer):
        self.applies = not device.SIM and not buffer.world.lists
        self._buffer, self._machine = buffer, buffer.machine
        self._names = [(rank, name) for rank in buffer.world.ranks for name in ("x", "ids or map", "probs")]
        self._known, self._state = {}, None

    def key(self, kind, arrays, *numbers):
        """What the call is known by; None if it has to take the general way. arrays: None, arrays, pairs of arrays.

        A call that waits for the host has no key; any other begins here, so here the machine learns of captures.
        """
        if is_captured(self._machine) or not self.applies:
            return None
        seen = [kind, *numbers]
        for a in arrays:
            pair = a if type(a) in (tuple, list) else (a,)
            for one in pair:
                at = None if one is None else look(one)
                if one is not None and at is UNSEEN:
                    return None
                seen.append(at)
        return tuple(seen)

    def again(self, key, arrays):
        """Results of a call that is known, its kernels launched; else None. arrays: of key(), kept alive as there."""
        if key is None:
            return None
        buffer = self._buffer
        state = self._machine.n_freed, buffer.n_changes
        if state != self._state:                # launches may name memory that is gone
            self._known.clear()
            self._state = state
        known = self._known.get(key)
        if known is None:
            return None
        loans = [memory.lend() for memory in known.memory]
        launches = None if None in loans else known.launches.get(tuple([place_of(loan) for loan in loans]))
        if launches is None:
            return None
        buffer.expect_open()
        try:
            self._machine.start(launches)
        except Exception as error:
            buffer.failure = buffer.failure or error
            raise
        buffer.placing.keep(self._names, arrays)
        return known.results(*loans)

    @contextmanager
    def watching(self, key):
        """Context of the general way; gives remember(memory, loans, results), to be called at its end.

        memory: what lends; loans: what it has lent; results: function of the loans.
        """
        if key is None:
            yield _forget
            return
        with self._machine.recording() as launches:
            yield lambda *what: self._remember(key, launches, *what)

    def _remember(self, key, launches, memory, loans, results):
        if (self._machine.n_freed, self._buffer.n_changes) != self._state or None in loans:
            return
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        if key not in self._known:
            self._known[key] = _Known(memory, results)
        self._known[key].launches[tuple([place_of(loan) for loan in loans])] = launches


def _forget(memory, loans, results):
    """Nothing."""
