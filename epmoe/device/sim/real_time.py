"""Time and waiting for a rank in a separate process. Uses the real clock, and yields the processor to other ranks."""

import os
import time

SPINS = 20  # polls with only a yield between them, before the process sleeps between polls
NAP_S = 0.0005
BUSY_S = 0.005  # if this rank did other work for this long since its last poll, it spins again
yield_processor = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS has no sched_yield


class RealTime:
    """The kernels' clock, and the pause when every thread of this process waits for another process.

    If there are more ranks than cores, a rank that only spins would block the ranks that it waits for.
    """

    def __init__(self):
        self.looks, self.last = 0, 0.0

    def __call__(self):
        """Nanoseconds since some start."""
        return time.monotonic_ns()

    def let_others_run(self):
        """Yield the processor for a moment."""
        now = time.monotonic()
        self.looks = self.looks + 1 if now - self.last < BUSY_S else 0
        if self.looks < SPINS:
            yield_processor()
        else:
            time.sleep(NAP_S)
        self.last = time.monotonic()
