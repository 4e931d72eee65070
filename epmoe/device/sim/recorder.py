"""Records the operations of a run's kernels, in order: every access to global memory, every fence and barrier.

`SimMachine(..., recorder=Recorder())` uses a RecordingDetector as its race detector. The detector gets every operation
anyway, and knows which release an acquire saw. Without a recorder this costs nothing.
"""

import ctypes
import sys

from .actors import covers
from .detector import SCOPE_NAMES, Detector
from .memory import MEMORY
from .race_report import site
from .scheduler import NOW
from .threads import kernel_frame


class Event:
    """One operation of one thread.

    number: its index in Recorder.events. step: operations done by any thread before it, over all runs. launch: its
    index in Recorder.launches, or -1. rank, block, thread: the actor; thread is -1 for a whole block.
    kind: "load", "store", "atomic" (read-modify-write), "fence", "barrier" (of a block), "warp barrier", "begin" and
    "end" (of a block). order: "weak", "relaxed", "acquire", "release" or "acq_rel". scope: "cta", "gpu", "sys", or ""
    for weak accesses. span: the memory.Span, address, nbytes: the bytes touched; saw, wrote: the bytes read or written,
    or None. sources: numbers of the events whose release this one acquired.
    """

    __slots__ = (
        "number step launch rank block thread kind order scope word span address nbytes saw wrote sources _code _place"
    ).split()

    def __init__(
        self,
        number,
        step,
        launch,
        rank,
        block,
        thread,
        kind,
        order="weak",
        scope="",
        word="",
        span=None,
        address=0,
        nbytes=0,
        saw=None,
        sources=(),
        frame=None,
    ):
        self.number, self.step, self.launch = number, step, launch
        self.rank, self.block, self.thread = rank, block, thread
        self.kind, self.order, self.scope, self.word = kind, order, scope, word
        self.span, self.address = span, address
        self.nbytes, self.saw, self.wrote = nbytes, saw, None
        self.sources = sources
        self._code, self._place = (frame.f_code, frame.f_lasti) if frame is not None else (None, 0)

    @property
    def line(self):
        """Its source line, such as "send.py:91"; empty for the beginning and end of a block."""
        return site(self._code, self._place) if self._code is not None else ""

    @property
    def warp(self):
        """Index of the warp in its block; -1 for a whole block."""
        return self.thread >> 5

    def __repr__(self):
        what = " ".join(w for w in (self.word or self.kind, self.line) if w)
        place = " of " + self.span.describe(self.address) if self.span is not None else ""
        return "<step %d, rank %d block %d thread %d: %s%s>" % (
            self.step,
            self.rank,
            self.block,
            self.thread,
            what,
            place,
        )


class RecordedLaunch:
    """One launch: kernel name, rank, grid, threads, number of its run."""

    __slots__ = ("kernel", "rank", "grid", "threads", "run")

    def __init__(self, launch, run):
        self.kernel, self.rank = launch.kernel.name, launch.rank
        self.grid, self.threads = launch.grid, launch.threads
        self.run = run


class RecordedRun:
    """The launches between two waits of the host: first step, and the bytes of every buffer before it."""

    __slots__ = ("first_step", "first_event", "before")

    def __init__(self, first_step, first_event):
        self.first_step, self.first_event = first_step, first_event
        self.before = {
            (s.low, s.high): ctypes.string_at(s.low, s.high - s.low) for s in MEMORY.spans if s.high > s.low > 0
        }


class Recorder:
    """The record: `events` in the order in which they happened, `launches`, and `runs`."""

    def __init__(self):
        self.events, self.launches, self.runs = [], [], []

    def watch(self, machine, queues):
        """The detector of the run that begins now."""
        self.runs.append(RecordedRun(machine.steps, len(self.events)))
        return RecordingDetector(machine, queues, self)


class RecordingDetector(Detector):
    """Checks everything that a Detector checks, and records each operation on global memory in a Recorder."""

    def __init__(self, machine, queues, recorder):
        super().__init__(machine, queues)
        self.recorder, self.events = recorder, recorder.events
        self.first_step = machine.steps
        self.in_memory = {id(s) for s in MEMORY.spans}  # global memory, not shared memory
        self.launch_places = {}  # launch -> its index in recorder.launches
        self.unread = []  # events whose stores happen after the detector has seen them
        self.on_their_way = []  # events of bulk stores that nobody has waited for yet
        self.acquired = []  # access numbers that the current operation acquires
        self.event_of = {}  # access number of a strong operation -> number of its event

    # ------------------------------------------------------------------ entering
    def enter(self, a, kind, **what):
        """A new event of an actor."""
        event = Event(
            len(self.events),
            self.first_step + NOW.steps,
            self.launch_places[a.launch],
            a.rank,
            a.block.index,
            a.tid,
            kind,
            **what,
        )
        self.events.append(event)
        return event

    def settle(self):
        """The announced stores are done now, so keep the bytes that they wrote."""
        for event in self.unread:
            event.wrote = ctypes.string_at(event.address, event.nbytes)
        self.unread.clear()

    # ------------------------------------------------------------------ launches, blocks, threads
    def launch_begins(self, launch):
        super().launch_begins(launch)
        self.launch_places[launch] = len(self.recorder.launches)
        self.recorder.launches.append(RecordedLaunch(launch, len(self.recorder.runs) - 1))

    def block_begins(self, block):
        super().block_begins(block)
        self.enter(block.actors[0], "begin").thread = -1

    def thread_ends(self, a):
        super().thread_ends(a)
        self.settle()
        self.land(a)
        if a.block.live == 1:
            self.enter(a, "end").thread = -1

    # ------------------------------------------------------------------ accesses
    def plain(self, a, address, n, write, word, frame, span, nc=False):
        self.settle()
        super().plain(a, address, n, write, word, frame, span, nc)
        if id(span) in self.in_memory:
            saw = None if write else ctypes.string_at(address, n)
            event = self.enter(
                a, "store" if write else "load", word=word, span=span, address=address, nbytes=n, saw=saw, frame=frame
            )
            if write:
                self.unread.append(event)

    def strong(self, a, address, n, read, write, scope, acquire, release, word, frame, span, before, after):
        self.settle()
        self.acquired.clear()
        value = super().strong(a, address, n, read, write, scope, acquire, release, word, frame, span, before, after)
        if id(span) in self.in_memory:
            order = "acq_rel" if acquire and release else "acquire" if acquire else "release" if release else "relaxed"
            event = self.enter(
                a,
                "atomic" if read and write else "store" if write else "load",
                order=order,
                scope=SCOPE_NAMES[scope],
                word=word,
                span=span,
                address=address,
                nbytes=n,
                saw=ctypes.string_at(address, n) if read else None,
                sources=self.sources(),
                frame=kernel_frame(frame),
            )
            if write:
                self.event_of[self.number] = event.number
                self.unread.append(event)
        return value

    def observe(self, a, location, access, acquire, scope, last, heads):
        super().observe(a, location, access, acquire, scope, last, heads)
        if acquire:
            self.acquired += [h[3] for h in heads.values() if self.acquires(a, scope, h)]

    def fence(self, a, scope):
        self.settle()
        self.acquired[:] = [h[3] for heads in a.observed.values() for h in heads.values() if self.acquires(a, scope, h)]
        super().fence(a, scope)
        self.enter(
            a,
            "fence",
            order="acq_rel",
            scope=SCOPE_NAMES[scope],
            word="fence_acq_rel_" + SCOPE_NAMES[scope],
            sources=self.sources(),
            frame=kernel_frame(sys._getframe(1)),
        )

    @staticmethod
    def acquires(a, scope, head):
        """True if an acquire of actor a takes this release head: each scope includes the other's thread."""
        return head[0] is not a and covers(head[1], head[0], a) and covers(scope, a, head[0])

    def sources(self):
        """Events of the releases just acquired."""
        found = {self.event_of[access[11]] for access in self.acquired if access[11] in self.event_of}
        self.acquired.clear()
        return tuple(sorted(found))

    # ------------------------------------------------------------------ barriers
    def barrier(self, actors):
        self.settle()
        super().barrier(actors)
        a = actors[-1]
        whole = bool(a.block.arrived) and a.block.arrived[0].actor is actors[0]
        event = self.enter(
            a,
            "barrier" if whole else "warp barrier",
            scope="cta",
            word="syncthreads" if whole else "syncwarp",
            frame=kernel_frame(sys._getframe(1)),
        )
        if whole:
            event.thread = -1

    # ------------------------------------------------------------------ bulk copies
    def bulk(self, e, address, nbytes, write, word, frame, span):
        self.settle()
        super().bulk(e, address, nbytes, write, word, frame, span)
        if id(span) in self.in_memory:
            saw = None if write else ctypes.string_at(address, nbytes)
            event = self.enter(
                e,
                "store" if write else "load",
                word=word,
                span=span,
                address=address,
                nbytes=nbytes,
                saw=saw,
                frame=kernel_frame(frame),
            )
            if write:
                self.on_their_way.append(event)

    def bulk_wait(self, a, writes):
        super().bulk_wait(a, writes)
        self.land(a)

    def land(self, a):
        """Bulk stores of this thread are done, so keep the bytes that they wrote."""
        mine = [v for v in self.on_their_way if (v.rank, v.block, v.thread) == (a.rank, a.block.index, a.tid)]
        for event in mine:
            event.wrote = ctypes.string_at(event.address, event.nbytes)
            self.on_their_way.remove(event)
