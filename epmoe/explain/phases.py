"""A timeline of each block: phases, inferred from the regions that it touches, waits and synchronising operations."""

from collections import defaultdict
from typing import NamedTuple

from epmoe.explain.arrays import NOT_ARRIVED, SIGNALS

# phase -> a description of the block's work
PHASES = {
    "read": "reads the routing",
    "send": "sends messages",
    "signal": "signals counts",
    "place": "works out places",
    "copy": "copies rows",
    "return": "returns rows",
    "reduce": "reduces tokens",
    "clean": "cleans up",
}
WRITES = {
    "dispatch_recv_buf": "send",
    "dispatch_send_buf": "send",
    "reserved": "send",
    "rank_completion": "signal",
    "dispatch_recv_count": "signal",
    "combine_recv_count": "signal",
    "A": "place",
    "B": "place",
    "E": "place",
    "row_offsets": "place",
    "expert_ids": "place",
    "output_tokens": "copy",
    "output_scales": "copy",
    "src_info": "copy",
    "combine_recv_buf": "return",
    "combine_send_buf": "return",
    "combined": "reduce",
    "combine_ready": "signal",
}
READS = {
    "topk_ids": "read",
    "input_tokens": "send",
    "dispatch_recv_buf": "copy",
    "expert_outputs": "return",
    "combine_recv_buf": "reduce",
    "router_weights": "reduce",
}
CLEARED = ("reserved", "finished", "A", "D", "E", "F", "G", "rank_completion")
LEAST = 0.004  # of a run: shorter waits get no slice


class Slice(NamedTuple):
    """An interval of a block's time: a phase of PHASES, or "wait" with the word that the block polls."""

    phase: str
    begin: int
    end: int
    word: str


class Mark(NamedTuple):
    """A synchronising operation of a block: "signal", "release", "acquire", "fence" or "barrier"."""

    kind: str
    event: object


class Arrow(NamedTuple):
    """An arrow from a release to the acquire that read its value. across: whether between ranks."""

    source: object
    target: object
    across: bool


class Lane(NamedTuple):
    """One block of one launch."""

    rank: int
    block: int
    kernel: str
    begin: int
    end: int
    slices: list
    marks: list


class Timeline:
    """Lanes of a recording by launch and block, and all arrows."""

    def __init__(self, history):
        self.arrays, self.launches = history.arrays, history.recording.recorder.launches
        events = defaultdict(list)
        for event in history.recording.events:
            events[event.launch, event.block].append(event)
        self.arrows = arrows(history.recording.events)
        self._releases = {a.source.number for a in self.arrows}
        self.lanes = [self._lane(of_block) for _, of_block in sorted(events.items())]

    def phase_of(self, event):
        """The phase that an event belongs to; None if the event does not tell."""
        touched = self.arrays.find(event)
        if touched is None:
            return None
        name, kernel = touched.array.name, self.launches[event.launch].kernel
        if event.kind == "load":
            if name == "dispatch_recv_count" and event.order != "weak":
                return "place" if int.from_bytes(event.saw, "little") != NOT_ARRIVED else None
            if event.order != "weak":
                return None
            if name == "topk_ids" and kernel.startswith("combine"):
                return "reduce"
            if name in ("A", "B", "src_info"):
                return "return" if kernel.startswith("combine") else "copy"
            return READS.get(name)
        value = int.from_bytes(event.wrote, "little") if event.wrote is not None and event.nbytes <= 8 else None
        if event.kind == "store" and (name in CLEARED and value == 0 or name in SIGNALS and value == NOT_ARRIVED):
            return "clean"
        if name == "combine_ready" and value == 0:
            return None
        if name == "finished":
            return "return" if kernel.startswith("combine") else "send"
        if name == "C":
            return "copy" if event.kind == "atomic" else "place"
        return WRITES.get(name)

    def _lane(self, events):
        first, last = events[0], events[-1]
        slices = cut(self._phases(events), self._waits(events, last.step - first.step))
        marks = [Mark(kind, e) for e in events if (kind := self.mark_of(e))]
        kernel = self.launches[first.launch].kernel
        return Lane(first.rank, first.block, kernel, first.step, last.step, slices, marks)

    def mark_of(self, event):
        """The kind of mark that an event gets in the timeline, or None."""
        if event.kind in ("barrier", "fence"):
            return event.kind
        if event.kind in ("store", "atomic") and event.order != "weak":
            touched = self.arrays.find(event)
            value = int.from_bytes(event.wrote, "little") if event.wrote is not None else None
            if touched is not None and touched.array.name in SIGNALS and value != NOT_ARRIVED:
                return "signal"
        if event.order in ("release", "acq_rel") or event.number in self._releases:
            return "release"
        return "acquire" if event.sources else None

    def _phases(self, events):
        """[(phase, begin, end)]: intervals of classified events; one absorbs a short one inside it."""
        runs = []
        for event in events:
            phase = self.phase_of(event)
            if phase is None:
                continue
            if runs and runs[-1][0] == phase:
                runs[-1][2] = event.step + 1
                continue
            if runs and (runs[-1][0], phase) == ("place", "copy"):
                # places are computed in shared memory, until the first row is copied
                runs[-1][2] = event.step
            runs.append([phase, event.step, event.step + 1])
        least = 0.02 * (events[-1].step - events[0].step)
        merged = []
        for run in runs:
            if merged and merged[-1][0] == run[0]:
                merged[-1][2] = run[2]
            elif len(merged) > 1 and merged[-2][0] == run[0] and merged[-1][2] - merged[-1][1] < least:
                merged.pop()
                merged[-1][2] = run[2]
            else:
                merged.append(run)
        return merged

    def _waits(self, events, length):
        """[(begin, end, word)]: intervals in which threads of the block polled and none did anything else."""
        polling, polls, work = {}, [], []
        for event in events:
            polled = event.kind == "load" and event.order != "weak"
            before = polling.pop(event.thread, None)
            if before is not None and polled and event.address == before.address:
                polls.append((before.step, event.step, before))
            if polled:
                polling[event.thread] = event
            elif event.kind not in ("barrier", "warp barrier", "begin", "end"):
                work.append(event.step)
        found, edges = [], sorted(set(work))
        for begin, end, event in merged_waits(polls):
            inside = [begin, *(s for s in edges if begin < s < end), end]
            for a, b in zip(inside, inside[1:]):
                if b - a > LEAST * max(length, 1):
                    if found and a - found[-1][1] < 2 * LEAST * length:
                        a = found.pop()[0]
                    found.append((a, b, self.arrays.place(event)))
        return found


def merged_waits(polls):
    """Join overlapping intervals of polling: [(begin, end, an event)]."""
    merged = []
    for begin, end, event in sorted(polls, key=lambda p: (p[0], p[1])):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end, event])
    return merged


def cut(phases, waits):
    """Slices in order, without overlaps: waits stay whole, and phases are cut around them."""
    slices = [Slice("wait", *w) for w in waits]
    for phase, begin, end in phases:
        at = begin
        for w_begin, w_end, _ in waits:
            if w_end <= at or w_begin >= end:
                continue
            if w_begin > at:
                slices.append(Slice(phase, at, w_begin, ""))
            at = max(at, w_end)
        if at < end:
            slices.append(Slice(phase, at, end, ""))
    return sorted(slices, key=lambda s: s.begin)


def arrows(events):
    """Arrows from each release to the first acquire in each other block that read its value."""
    found, seen = [], set()
    for event in events:
        for number in event.sources:
            source = events[number]
            key = number, event.rank, event.block, event.launch
            if (source.launch, source.block) != (event.launch, event.block) and key not in seen:
                seen.add(key)
                found.append(Arrow(source, event, source.rank != event.rank))
    return found
