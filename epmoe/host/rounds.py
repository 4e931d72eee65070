"""Checks the order of calls that the protocol needs: dispatch, combine, dispatch, combine, the same on every rank.

A buffer may be written again only after its owner has read it. The alternation guarantees this: a rank's combine cannot
complete before every peer has finished the dispatch before it.

Calls that are captured into CUDA graphs follow the same order. A round is captured whole or not at all (in one graph,
or for example in one for dispatch and one for combine). A captured dispatch has not run. If its capture was abandoned,
the next dispatch begins a new round. The caller is responsible for the order in which graphs are replayed.
"""

import functools
from threading import get_ident

from epmoe_ref.errors import EPStateError, EPValueError

# state -> {call: next state}
_NEXT = {
    "idle": {"dispatch_async": "dispatching", "dispatch": "dispatched"},
    "dispatching": {"dispatch_wait": "dispatched"},
    "dispatched": {"combine_async": "combining", "combine": "idle"},
    "combining": {"combine_wait": "idle"},
    "failed": {},
    "closed": {},
}

AFTER = {call: state for calls in _NEXT.values() for call, state in calls.items()}

_REASON = {
    "idle": "no dispatch is open: call dispatch (or dispatch_async and dispatch_wait) first",
    "dispatching": "dispatch_async was called and its dispatch_wait was not: call dispatch_wait next",
    "dispatched": "a dispatch is open: combine it first. Two dispatches in a row would overwrite messages that a slower rank "
    "may not have read yet. If what it returned is lost, call reset() on all ranks",
    # a wait after it
    "returned": "the open dispatch has returned and combine_async was not called: call combine_async (or combine) next",
    "combining": "combine_async was called and its combine_wait was not: call combine_wait next",
    # an open round of which one call is captured and the other is not
    "launched": "the open dispatch was launched and not captured: combine it before the capture begins",
    "captured": "the open dispatch was captured into a CUDA graph and has not run: capture its combine too",
}
# Errors that need no reset(): a call was refused, or ids in device memory were bad.
REFUSALS = EPValueError, EPStateError


class Turn:
    """Allows one call at a time on an object, from any thread.

    A call begins with free.pop(), or with refuse() if that raises IndexError, and ends with free[:] = (True,). Each is
    atomic: no other thread and no exception can interrupt it.
    failure: the error after which only reset() helps, in short, or None; failed_call: the call that it ended.
    """

    __slots__ = "free", "thread", "failure", "failed_call"

    def __init__(self):
        self.free, self.thread, self.failure, self.failed_call = [True], None, None, None

    def refuse(self, call):
        """Raise EPStateError: a call is under way. Its thread may call reset() and close(): it may have been interrupted."""
        if call not in ("reset", "close") or self.thread != get_ident():
            raise EPStateError(
                f"{call}: another call is under way, in another thread or around a function of yours: make calls one after "
                "another, or give each thread a world of its own"
            )

    def fail(self, call, error):
        """Record that an error or an interruption ended this call half-way; the first error is kept, as text.

        The error itself would keep the call's arrays and results.
        """
        if self.failure is None:
            name, first_line = type(error).__name__, str(error).partition("\n")[0]
            self.failed_call, self.failure = call, f"{name} ({first_line})" if first_line else name


def part_of_round(method):
    """Wrap a method of an ExpertParallel: any exception but a refusal marks the round as failed, once it may have launched.

    That includes KeyboardInterrupt, SystemExit and exceptions from signal handlers; Engine.start() marks its own.
    A call of a round is refused unless it is its turn.
    """

    name = method.__name__
    has_turn = name in AFTER

    @functools.wraps(method)
    def watched(self, *arguments, **options):
        rounds = self._rounds
        try:
            rounds.free.pop()
        except IndexError:
            rounds.refuse(name)
        rounds.thread = get_ident()
        try:
            if has_turn:
                rounds.capture = capture = rounds.captured_now()
                if name not in _NEXT[rounds.state] or capture != rounds.opened_in:
                    rounds.expect(name, capture)
            return method(self, *arguments, **options)
        except REFUSALS:
            raise
        except BaseException as error:
            if name not in _NEXT[rounds.state]:  # else the call has not launched, and may be made again
                rounds.fail(name, error)
            raise
        finally:
            rounds.free[:] = (True,)

    return watched


class Rounds(Turn):
    """The state of one ExpertParallel's round, and its Turn.

    captured_now(): id of the CUDA graph capture that the ranks' stream is in, 0 for none. capture, opened_in: that id
    for the current call, and for the call that opened the round.
    """

    __slots__ = "state", "captured_now", "capture", "opened_in"

    def __init__(self, captured_now):
        super().__init__()
        self.state, self.captured_now, self.capture, self.opened_in = "idle", captured_now, 0, 0

    def expect_open(self, call):
        """Raise EPStateError after close()."""
        if self.state == "closed":
            raise EPStateError(f"{call}: this ExpertParallel is closed: make a new one")

    def expect(self, call, capture):
        """Raise EPStateError, with the reason, unless it is this call's turn. capture: id of a capture, 0 for none."""
        self.expect_open(call)
        if self.failure is not None:
            raise EPStateError(
                f"{call}: {self.failed_call} was ended by {self.failure}, so buffers and counters are in the middle "
                "of a round; call reset() on all ranks first"
            )
        if capture != self.opened_in and self.state != "idle":
            if self.opened_in and call in _NEXT["idle"]:
                self.state = "idle"  # that round was abandoned with its capture
            elif not (capture and self.opened_in):
                raise EPStateError(f"{call}: {_REASON['launched' if capture else 'captured']}")
        if call not in _NEXT[self.state]:
            returned = self.state == "dispatched" and call.endswith("_wait")
            raise EPStateError(f"{call}: {_REASON['returned' if returned else self.state]}")

    def fail(self, call, error):
        super().fail(call, error)
        if self.state != "closed":
            self.state = "failed"

    def reset(self):
        """Return to the initial state."""
        self.state, self.failure, self.opened_in = "idle", None, 0
