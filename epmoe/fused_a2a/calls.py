"""What the calls of a Buffer were given: ranks compare it where it is new, and when a wait has expired."""

from collections import deque

from epmoe.worlds.agreement import differences
from epmoe_ref.errors import PeerTimeout

MOST_CALLS = 32
PATIENCE_S = 2.0  # ranks that wait for each other give up at about the same time
SAME = "do all ranks make the same calls, with the same sizes?"


class CallLog:
    """number: of the call under way, alike on all ranks. recent: (number, facts) of the latest calls of this rank.

    facts: what all ranks must have given alike, a dict by name; "call" is the call's own name.
    """

    def __init__(self, world):
        self._world, self._agreed = world, set()
        self.number, self.recent = 0, deque(maxlen=MOST_CALLS)

    def agree(self, facts, timeout):
        """Compare facts that are new with the other ranks'. Errors: EPValueError, on all ranks, says what differs."""
        self.recent.append((self.number, facts))
        key = tuple(facts.items())
        if key in self._agreed:
            return
        try:
            self._world.same(f"what the ranks gave to {facts['call']}", facts, timeout)
        except PeerTimeout as late:
            raise PeerTimeout(f"{late}. This rank calls {_as_called(facts)}: {SAME}") from None
        self._agreed.add(key)

    def compared(self, timeout):
        """In what the ranks' calls differ, in words; waits a little for the other ranks."""
        world = self._world
        if world.lists:
            return ""
        of_ranks = world.hear(dict(self.recent), min(timeout, PATIENCE_S))
        for number in sorted(set.intersection(*map(set, of_ranks.values()))):
            given = {rank: known[number] for rank, known in of_ranks.items()}
            if differing := differences(given):
                calls = {facts["call"] for facts in given.values()}
                what = "made different calls"
                if len(calls) == 1:
                    what = f"gave {calls.pop()} different sizes"
                return f". The ranks {what}: {differing}. Make the same calls on every rank, with the same sizes"
        if len(of_ranks) == world.n_ranks:
            return ""
        return f". This rank called {_as_called(self.recent[-1][1])}: {SAME}"

    def clear(self):
        """As before the first call."""
        self._agreed.clear()
        self.recent.clear()
        self.number = 0


def _as_called(facts):
    """A call and what it was given, in words."""
    given = ", ".join(f"{name}={value!r}" for name, value in facts.items() if name != "call")
    return f"{facts['call']} with {given or 'nothing'}"
