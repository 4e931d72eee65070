"""The last calls of a Buffer, which ranks compare when a wait has expired: did they make the same calls?"""

from collections import deque

from epmoe.worlds.agreement import differences

MOST_CALLS = 16
PATIENCE_S = 2.0  # ranks that wait for each other give up at about the same time


class Calls:
    """What this rank gave to its last calls, numbered alike on all ranks.

    number: of the call under way. latest: what it was given, as for Buffer.want_pool().
    """

    def __init__(self):
        self._known = deque(maxlen=MOST_CALLS)
        self.number, self.latest = 0, {}

    def begin(self, facts):
        """The call under way was given this."""
        if self.latest is not facts or self._known[-1][0] != self.number:
            self.latest = facts
            self._known.append((self.number, facts))

    def reset(self):
        """As before the first call."""
        self._known.clear()
        self.number, self.latest = 0, {}

    def compared(self, world, timeout):
        """After a wait has expired: in what the ranks' calls differ, in words; waits a little for the other ranks."""
        if world.lists:
            return ""
        of_ranks = world.hear(dict(self._known), min(timeout, PATIENCE_S))
        for number in sorted(set.intersection(*map(set, of_ranks.values()))):
            given = {rank: known[number] for rank, known in of_ranks.items()}
            differing = differences(given)
            if differing:
                calls = {facts["call"] for facts in given.values()}
                what = (
                    f"gave {calls.pop()} different sizes"
                    if len(calls) == 1
                    else "made different calls"
                )
                return f". The ranks {what}: {differing}. Make the same calls on every rank, with the same sizes"
        if len(of_ranks) == world.n_ranks:
            return ""
        return f". This rank called {as_called(self.latest)}: do all ranks make the same calls, with the same sizes?"


def as_called(facts):
    """A call and what it was given, in words."""
    call, *given = (
        f"{name}={value!r}" if name != "call" else value for name, value in facts.items()
    )
    return f"{call} with {', '.join(given) or 'nothing'}"
