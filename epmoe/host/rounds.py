"""The order of calls that the protocol needs, tracked: dispatch, combine, dispatch, combine, on every rank alike.

A buffer may be written again only after its owner has read it, and it is the alternation that guarantees this: a rank's
combine cannot complete before every peer has finished the dispatch before it.

Calls that are captured into CUDA graphs follow the same order, and a round is captured whole or not at all (in one
graph or, for instance, one for dispatch and one for combine). A dispatch that was captured has not run: when its
capture was given up, the next dispatch simply begins anew. What order graphs are replayed in is the caller's care.
"""

from epmoe_ref.errors import EPStateError

# state -> {call: next state}
_NEXT = {
    "idle": {"dispatch_async": "dispatching", "dispatch": "dispatched"},
    "dispatching": {"dispatch_wait": "dispatched"},
    "dispatched": {"combine_async": "combining", "combine": "idle"},
    "combining": {"combine_wait": "idle"},
}

_BEFORE = {call: state for state, calls in _NEXT.items() for call in calls}
_AFTER = {call: state for calls in _NEXT.values() for call, state in calls.items()}

_REASON = {
    "idle": "no dispatch is open: call dispatch (or dispatch_async and dispatch_wait) first",
    "dispatching": "dispatch_async was called and its dispatch_wait was not: call dispatch_wait next",
    "dispatched": "a dispatch is open: combine it first. Two dispatches in a row would overwrite messages that a "
                  "slower rank may not have read yet",
    "combining": "combine_async was called and its combine_wait was not: call combine_wait next",
    "closed": "this ExpertParallel is closed: make a new one",
}

_CAPTURED = {
    True: "the open dispatch was launched and not captured: combine it before the capture begins",
    False: "the open dispatch was captured into a CUDA graph and has not run: capture its combine too",
}


class Rounds:
    """Where in a round one ExpertParallel is. `failure` is the error after which only reset() helps, or None."""

    def __init__(self):
        self.state, self.failure = "idle", None
        self.capture = self.opened_in = 0       # ids of captures: of the call under way, of the open round

    def expect(self, call, capture=0):
        """Raise EPStateError, with the reason, unless the call may come now. capture: id of a capture, 0 for none."""
        self.capture = capture
        if self.state == "closed":
            raise EPStateError(f"{call}: {_REASON['closed']}")
        if self.failure is not None:
            first_line = str(self.failure).partition("\n")[0]
            raise EPStateError(f"{call} after {type(self.failure).__name__} ({first_line}): buffers and counters are "
                               "in the middle of that round; call reset() on all ranks first")
        if capture != self.opened_in and self.state != "idle":
            if self.opened_in and call in _NEXT["idle"]:
                self.state = "idle"     # that round was given up with its capture
            elif not (capture and self.opened_in):
                raise EPStateError(f"{call}: {_CAPTURED[bool(capture)]}")
        if call not in _NEXT[self.state]:
            raise EPStateError(f"{call}: {_REASON[self.state]}")

    def comes(self, call):
        """Whether expect() would let the call come now, if it is captured by no graph; sooner told."""
        self.capture = 0
        return self.state == _BEFORE[call] and (not self.opened_in or self.state == "idle")

    def advance(self, call):
        """The call was launched."""
        self.state = _AFTER[call]
        self.opened_in = self.capture

    def fail(self, error):
        """A launch or a wait failed; keeps the first error."""
        self.failure = self.failure or error
        if self.state != "closed":
            self.state = "failed"

    def reset(self):
        """As at the beginning."""
        self.state, self.failure, self.opened_in = "idle", None, 0

    def close(self):
        """No call may come any more."""
        self.state = "closed"
