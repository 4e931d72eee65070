"""A trace for Perfetto or chrome://tracing: ranks as processes, blocks as threads, phases as slices, signals as arrows.

Source of the format: "Trace Event Format" of the Chromium project. Times are in microseconds. Perfetto treats process 0
and thread 0 as idle, and expects thread numbers to be unique over all processes: see `process` and `thread`.
"""

import json


def process(rank):
    """A rank's process number."""
    return rank + 1


def thread(rank, block):
    """A block's thread number, unique over all ranks."""
    return 10_000 * (rank + 1) + block


class Trace:
    """Collects events: slices of a rank's block, and arrows between them."""

    def __init__(self, about):
        self.events, self.about, self._threads, self._arrows = [], about, set(), 0

    def slice(self, rank, block, name, begin_us, end_us, category, **arguments):
        """Add an interval of a block's time; it is drawn below a longer interval that contains it."""
        if (rank, block) not in self._threads:
            self._name(rank, block)
        self.events.append(
            dict(
                ph="X",
                pid=process(rank),
                tid=thread(rank, block),
                name=name,
                cat=category,
                ts=round(begin_us, 4),
                dur=round(max(end_us - begin_us, 0), 4),
                args=arguments,
            )
        )

    def arrow(self, name, source, target, category="signal"):
        """Add an arrow between two slices. source, target: (rank, block, a time inside the slice [us])."""
        self._arrows += 1
        for phase, (rank, block, at) in (("s", source), ("f", target)):
            event = dict(
                ph=phase,
                id=self._arrows,
                pid=process(rank),
                tid=thread(rank, block),
                name=name,
                cat=category,
                ts=round(at, 4),
            )
            self.events.append(event | ({"bp": "e"} if phase == "f" else {}))

    def _name(self, rank, block):
        if not any(r == rank for r, _ in self._threads):
            self.events.append(dict(ph="M", pid=process(rank), name="process_name", args={"name": f"rank {rank}"}))
            self.events.append(dict(ph="M", pid=process(rank), name="process_sort_index", args={"sort_index": rank}))
        self._threads.add((rank, block))
        self.events.append(
            dict(
                ph="M", pid=process(rank), tid=thread(rank, block), name="thread_name", args={"name": f"block {block}"}
            )
        )
        self.events.append(
            dict(
                ph="M", pid=process(rank), tid=thread(rank, block), name="thread_sort_index", args={"sort_index": block}
            )
        )

    def json(self):
        """The file's text."""
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ns", "otherData": self.about}) + "\n"
