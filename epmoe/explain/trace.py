"""A trace for Perfetto or chrome://tracing: ranks as processes, blocks as threads, phases as slices, signals as arrows.

Source of the format: "Trace Event Format" of the Chromium project. Times are in microseconds.
"""

import json


class Trace:
    """Collects events: slices of a rank's block, and arrows between them."""

    def __init__(self, about):
        self.events, self.about, self._threads, self._arrows = [], about, set(), 0

    def slice(self, rank, block, name, begin_us, end_us, category, **arguments):
        """Add an interval of a block's time; it is drawn below a longer interval that contains it."""
        if (rank, block) not in self._threads:
            self._name(rank, block)
        ts, dur = round(begin_us, 4), round(max(end_us - begin_us, 0), 4)
        self._add("X", rank, block, name, cat=category, ts=ts, dur=dur, args=arguments)

    def arrow(self, name, source, target, category="signal"):
        """Add an arrow between two slices. source, target: (rank, block, a time inside the slice [us])."""
        self._arrows += 1
        for phase, (rank, block, at), more in (("s", source, {}), ("f", target, {"bp": "e"})):
            self._add(phase, rank, block, name, id=self._arrows, cat=category, ts=round(at, 4), **more)

    def _name(self, rank, block):
        if not any(r == rank for r, _ in self._threads):
            self._add("M", rank, None, "process_name", args={"name": f"rank {rank}"})
            self._add("M", rank, None, "process_sort_index", args={"sort_index": rank})
        self._threads.add((rank, block))
        self._add("M", rank, block, "thread_name", args={"name": f"block {block}"})
        self._add("M", rank, block, "thread_sort_index", args={"sort_index": block})

    def _add(self, phase, rank, block, name, **more):
        """Add an event of a block, or of its rank's process if block is None. Perfetto treats process 0 and thread 0 as
        idle, and expects thread numbers to be unique over all processes."""
        thread = {} if block is None else {"tid": 10_000 * (rank + 1) + block}
        self.events.append(dict(ph=phase, pid=rank + 1, **thread, name=name, **more))

    def json(self):
        """The file's text."""
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ns", "otherData": self.about}) + "\n"
