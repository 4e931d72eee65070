"""The order of calls that the protocol needs, tracked: dispatch, combine, dispatch, combine, on every rank alike.

A buffer may be written again only after its owner has read it, and it is the alternation that guarantees this: a rank's
combine cannot complete before every peer has finished the dispatch before it.
"""

from epmoe_ref.errors import EPStateError

# state -> {call: next state}
_NEXT = {
    "idle": {"dispatch_async": "dispatching", "dispatch": "dispatched"},
    "dispatching": {"dispatch_wait": "dispatched"},
    "dispatched": {"combine_async": "combining", "combine": "idle"},
    "combining": {"combine_wait": "idle"},
}

_REASON = {
    "idle": "no dispatch is open: call dispatch (or dispatch_async and dispatch_wait) first",
    "dispatching": "dispatch_async was called and its dispatch_wait was not: call dispatch_wait next",
    "dispatched": "a dispatch is open: combine it first. Two dispatches in a row would overwrite messages that a "
                  "slower rank may not have read yet",
    "combining": "combine_async was called and its combine_wait was not: call combine_wait next",
    "closed": "this ExpertParallel is closed: make a new one",
}


class Rounds:
    """Where in a round one ExpertParallel is. `failure` is the error after which only reset() helps, or None."""

    def __init__(self):
        self.state, self.failure, self.done = "idle", None, 0

    def expect(self, call):
        """Raise EPStateError, with the reason, unless the call may come now."""
        if self.state == "closed":
            raise EPStateError(f"{call}: {_REASON['closed']}")
        if self.failure is not None:
            first_line = str(self.failure).partition("\n")[0]
            raise EPStateError(f"{call} after {type(self.failure).__name__} ({first_line}): buffers and counters are "
                               "in the middle of that round; call reset() on all ranks first")
        if call not in _NEXT[self.state]:
            raise EPStateError(f"{call}: {_REASON[self.state]}")

    def advance(self, call):
        """The call was launched."""
        self.state = _NEXT[self.state][call]
        self.done += self.state == "idle"

    def fail(self, error):
        """A launch or a wait failed; keeps the first error."""
        self.failure = self.failure or error

    def reset(self):
        """As at the beginning."""
        self.state, self.failure = "idle", None

    def close(self):
        """No call may come any more."""
        self.state = "closed"
