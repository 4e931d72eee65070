"""A trace for Perfetto or chrome://tracing: ranks as processes, blocks as threads, phases as slices, signals as arrows.

Source of the format: "Trace Event Format" of the Chromium project. Times are microseconds; the simulator counts 100 ns
for each memory operation of anybody.
"""

import json

from epmoe.device.sim.scheduler import STEP_NS
from epmoe.explain.palette import PHASES
from epmoe.explain.phases import Timeline

STEP_US = STEP_NS / 1000


class Trace:
    """Events in the making: slices on a rank's block, and arrows between them."""

    def __init__(self, about):
        self.events, self.about, self._threads, self._arrows = [], about, set(), 0

    def slice(self, rank, block, name, begin_us, end_us, category, **arguments):
        """A stretch of time of a block; inside a longer one it is drawn below it."""
        if (rank, block) not in self._threads:
            self._name(rank, block)
        self.events.append(dict(ph="X", pid=rank, tid=block, name=name, cat=category, ts=round(begin_us, 4),
                                dur=round(max(end_us - begin_us, 0), 4), args=arguments))

    def arrow(self, name, source, target, category="signal"):
        """An arrow between two slices; source, target: (rank, block, a time inside the slice [us])."""
        self._arrows += 1
        for phase, (rank, block, at) in (("s", source), ("f", target)):
            event = dict(ph=phase, id=self._arrows, pid=rank, tid=block, name=name, cat=category, ts=round(at, 4))
            self.events.append(event | ({"bp": "e"} if phase == "f" else {}))

    def _name(self, rank, block):
        if not any(r == rank for r, _ in self._threads):
            self.events.append(dict(ph="M", pid=rank, name="process_name", args={"name": f"rank {rank}"}))
            self.events.append(dict(ph="M", pid=rank, name="process_sort_index", args={"sort_index": rank}))
        self._threads.add((rank, block))
        self.events.append(dict(ph="M", pid=rank, tid=block, name="thread_name", args={"name": f"block {block}"}))
        self.events.append(dict(ph="M", pid=rank, tid=block, name="thread_sort_index", args={"sort_index": block}))

    def json(self):
        """The file's text."""
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ns", "otherData": self.about}) + "\n"


def of_recording(history, about):
    """The trace of a recorded round: launches, in them phases and waits, in them synchronising operations."""
    timeline, trace = Timeline(history), Trace(about | {"clock": f"simulator, {STEP_NS} ns a memory operation"})
    marked = set()
    for lane in timeline.lanes:
        # a block begins behind the step at which it was started, where another launch's block may have ended
        begin, end = (lane.begin + 0.96) * STEP_US, (lane.end + 0.94) * STEP_US
        trace.slice(lane.rank, lane.block, lane.kernel, begin, end, "kernel")
        for s in lane.slices:
            name = "waits" if s.phase == "wait" else PHASES[s.phase][0]
            trace.slice(lane.rank, lane.block, name, max(s.begin * STEP_US, begin), min(s.end * STEP_US, end), "phase",
                        **({"for": s.word} if s.word else {}))
        for mark in lane.marks:
            _operation(history, trace, mark.kind, mark.event)
            marked.add(mark.event.number)
    for arrow in timeline.arrows:
        for kind, event in (("release", arrow.source), ("acquire", arrow.target)):
            if event.number not in marked:
                _operation(history, trace, kind, event)
                marked.add(event.number)
        trace.arrow(history.arrays.place(arrow.source) or "fence", _at(arrow.source), _at(arrow.target),
                    "signal" if arrow.across else "own blocks")
    return trace


def _operation(history, trace, kind, event):
    begin = event.step * STEP_US
    arguments = {"word": event.word, "line": event.line, "thread": event.thread}
    if event.span is not None:
        arguments["place"] = history.arrays.place(event)
    trace.slice(event.rank, event.block, kind, begin, begin + 0.9 * STEP_US, "operation", **arguments)


def _at(event):
    return event.rank, event.block, (event.step + 0.5) * STEP_US
