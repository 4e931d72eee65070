"""Time between two points of a stream: CUDA events on a GPU, the wall clock around a finished simulator run."""

import time

from epmoe import device


class Clock:
    """Intervals on one stream: start and stop, then microseconds of all of them."""

    def __init__(self, machine, stream):
        self.machine, self.stream = machine, stream
        self._marks = []

    def start(self):
        """Begin an interval when all work now on the stream has ended."""
        self._mark()

    def stop(self):
        """End it when all work on the stream by now has ended."""
        self._mark()

    def _mark(self):
        if device.SIM:
            self.machine.synchronize()
            self._marks.append(time.perf_counter())
            return
        from cuda.bindings import driver as cu

        from epmoe.device.gpu_driver import check

        event = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DEFAULT))
        check(cu.cuEventRecord(event, self.stream.handle))
        self._marks.append(event)

    def times_us(self):
        """Microseconds of the intervals so far, in order. Waits for them, and forgets them."""
        self.machine.synchronize()
        marks, self._marks = self._marks, []
        pairs = zip(marks[::2], marks[1::2])
        if device.SIM:
            return [1e6 * (b - a) for a, b in pairs]
        from cuda.bindings import driver as cu

        from epmoe.device.gpu_driver import check

        times = [1e3 * check(cu.cuEventElapsedTime(a, b)) for a, b in pairs]
        for event in marks:
            check(cu.cuEventDestroy(event))
        return times
