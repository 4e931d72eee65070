"""The trace of a recorded round in the simulator's time: 100 ns for each memory operation of any thread."""

from epmoe.device.sim.scheduler import STEP_NS
from epmoe.explain.phases import PHASES, Timeline
from epmoe.explain.trace import Trace

STEP_US = STEP_NS / 1000


def of_recording(history, about):
    """The trace of a recorded round: launches contain phases and waits, which contain synchronising operations."""
    timeline = Timeline(history)
    trace = Trace(about | {"clock": f"simulator, {STEP_NS} ns a memory operation"})
    marked = set()
    for lane in timeline.lanes:
        # a block begins after the step that started it, at which another launch's block may have ended
        begin, end = (lane.begin + 0.96) * STEP_US, (lane.end + 0.94) * STEP_US
        trace.slice(lane.rank, lane.block, lane.kernel, begin, end, "kernel")
        for s in lane.slices:
            name = "waits" if s.phase == "wait" else PHASES[s.phase]
            trace.slice(
                lane.rank,
                lane.block,
                name,
                max(s.begin * STEP_US, begin),
                min(s.end * STEP_US, end),
                "phase",
                **({"for": s.word} if s.word else {}),
            )
        for mark in lane.marks:
            _operation(history, trace, mark.kind, mark.event)
            marked.add(mark.event.number)
    for arrow in timeline.arrows:
        for kind, event in (("release", arrow.source), ("acquire", arrow.target)):
            if event.number not in marked:
                _operation(history, trace, kind, event)
                marked.add(event.number)
        trace.arrow(
            history.arrays.place(arrow.source) or "fence",
            _at(arrow.source),
            _at(arrow.target),
            "signal" if arrow.across else "own blocks",
        )
    return trace


def _operation(history, trace, kind, event):
    begin = event.step * STEP_US
    arguments = {"word": event.word, "line": event.line, "thread": event.thread}
    if event.span is not None:
        arguments["place"] = history.arrays.place(event)
        for what, raw in (("saw", event.saw), ("wrote", event.wrote)):
            if raw is not None and len(raw) <= 8:
                arguments[what] = int.from_bytes(raw, "little")
    trace.slice(event.rank, event.block, kind, begin, begin + 0.9 * STEP_US, "operation", **arguments)


def _at(event):
    return event.rank, event.block, (event.step + 0.5) * STEP_US
