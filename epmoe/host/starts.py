"""How the launches of calls that are known start again."""


class Start:
    """The launches of one call, whose results lie in one place. slot: the Slot that they are in, None if in none.

    again: function () of the latest begin(held), which takes less time; None if nobody could look at the results.
    held: that of this begin().
    """

    __slots__ = ("slot", "again", "held", "_machine", "_start")

    def __init__(self, machine, start, slot=None):
        self.slot, self._machine, self._start = slot, machine, start
        self.again = self.held = None

    def begin(self, held):
        """Start them, if References at this address allow it; 0: nobody can look at the results. As a start says."""
        if held != self.held:
            self.held, self.again = held, self._machine.bound(self._start, held) if held else None
        return self.again() if held else self._start(0)
