"""Ends loops that never park. Ordinary loads, a barrier, a warp operation or a write keep a waiting loop from parking.

Nothing is recorded as long as threads end, or words change that parked threads wait for. After QUIET operations without
either, every access is recorded for a while. A thread is in a loop if it has done nothing new for a long time: it
touches no new address, and its loads return no new value. The run is stuck if every running thread is in a loop, and
each running block has a thread that polls a word. If no thread polls, it is stuck after LONG operations without a
barrier, a wake-up or a thread's end. So it is where other processes may write the words that threads poll. If some
thread does new things, recording stops for as long as the run has lasted so far. So slow and long runs cost little, and
a stuck run ends after about three times its length.
"""

from greenlet import getcurrent

QUIET = 300_000  # operations
LONG = 1_000_000  # operations
LENGTH = 20_000  # operations of the first recording
ROUNDS = 8  # a loop: at least this many times as many operations as up to the last new one
LOOKS = 8  # polls of one word by a thread that counts as waiting
PLENTY = 400  # a thread that still does new things after this many operations is at work


class Notes:
    """One thread's record: the number of operations, the last new one, all different ones, and its polls."""

    __slots__ = ("count", "new", "known", "looks", "last")

    def __init__(self):
        self.count = self.new = 0
        self.last = 0  # step of the last operation
        self.known = set()
        self.looks = {}  # address of a word -> [polls without a change, value, code, place]

    def note(self, what):
        self.count += 1
        if what not in self.known:
            self.known.add(what)
            self.new = self.count

    def goes_round(self):
        return self.new * ROUNDS <= self.count

    def looked_at(self):
        """(address, value, code, place) of each word that it polls."""
        return [(address, *look[1:]) for address, look in self.looks.items() if look[0] >= LOOKS]


class Watch:
    """Takes the race detector's place: records accesses, and passes them all on to it (`inner`, or None)."""

    def __init__(self, scheduler):
        self.scheduler, self.inner = scheduler, scheduler.detector
        self.begins, self.notes = scheduler.steps, {}
        scheduler.detector = self

    def __getattr__(self, name):
        if self.inner is not None:
            return getattr(self.inner, name)
        return self.nothing

    @staticmethod
    def nothing(*_, **__):
        """Stands in for the detector's other calls if there is none."""

    def of(self, t):
        notes = self.notes.get(t)
        if notes is None:
            notes = self.notes[t] = Notes()
        notes.last = self.scheduler.steps
        return notes

    def looked(self, address, value, frame):
        """A strong read that changed nothing."""
        notes = self.of(getcurrent())
        notes.note((address, value))
        look = notes.looks.setdefault(address, [0, value, None, 0])
        look[:] = look[0] + 1 if look[1] == value else 1, value, frame.f_code, frame.f_lasti

    # ------------------------------------------------------------------ calls of the detector
    def plain(self, a, address, n, write, word, frame, span, nc=False):
        if self.inner is not None:
            self.inner.plain(a, address, n, write, word, frame, span, nc)
        at = address - span.origin
        self.of(getcurrent()).note((address, n, None if write else bytes(span.bytes[at : at + n])))

    def strong(self, a, address, n, read, write, scope, acquire, release, word, frame, span, before, after):
        if self.inner is not None:
            before = self.inner.strong(
                a, address, n, read, write, scope, acquire, release, word, frame, span, before, after
            )
        if read and (not write or before == after):
            self.looked(address, before, frame)
        else:
            self.of(getcurrent()).note((address, n))
        return before

    def touch_mbarrier(self, a, bar, word, frame, span):
        if self.inner is not None:
            self.inner.touch_mbarrier(a, bar, word, frame, span)
        if word == "mbar_try_wait":
            self.looked(bar.address, bar.phase, frame)

    def bulk_store(self, a, source, target, nbytes, shared, span, frame):
        if self.inner is not None:
            self.inner.bulk_store(a, source, target, nbytes, shared, span, frame)
        self.of(getcurrent()).note((source, target, nbytes))

    def bulk_load(self, a, target, source, nbytes, shared, span, frame, mbarrier, mbarrier_span):
        self.of(getcurrent()).note((source, target, nbytes))
        if self.inner is not None:
            return self.inner.bulk_load(a, target, source, nbytes, shared, span, frame, mbarrier, mbarrier_span)
        return None

    def thread_ends(self, a):
        if self.inner is not None:
            self.inner.thread_ends(a)

    # ------------------------------------------------------------------ the verdict
    def verdict(self):
        """ "at work", "stuck" (every thread goes round, some poll), "round" (none polls), or None if not known yet."""
        scheduler, known, polls = self.scheduler, True, True
        lately = (self.begins + scheduler.steps) // 2
        if scheduler.stirred > self.begins:
            return "at work"
        here = getcurrent()
        for block in scheduler.run.blocks:
            runs = [t for t in block.threads if t.block is block and (t in block.ready or t is here)]
            done = [
                self.notes[t]
                for t in block.threads
                if t in self.notes and t.block is block and (t in runs or self.notes[t].last > lately)
            ]  # the others wait for ever
            if any(n.count >= PLENTY and not n.goes_round() for n in done):
                return "at work"
            known = known and all(n.goes_round() for n in done) and all(t in self.notes for t in runs)
            polls = polls and (not runs or any(n.looked_at() for n in done))
        return None if not known else "stuck" if polls else "round"


def look(scheduler):
    """Called now and then by a preempted thread: begin recording, or judge the record."""
    steps, watch, shared = scheduler.steps, scheduler.watch, bool(scheduler.real_time)
    if watch is None:
        begin = scheduler.quiet_since + LONG if shared else scheduler.stirred + QUIET
        if steps < begin:
            scheduler.next_look = begin
            return
        scheduler.watch = Watch(scheduler)
        scheduler.next_look = steps + max(LENGTH, steps // 16)
        return
    verdict, quiet, why = watch.verdict(), steps - scheduler.quiet_since, None
    if verdict == "at work":
        scheduler.detector, scheduler.watch, scheduler.next_look = watch.inner, None, 2 * steps
    elif verdict == "stuck" and not shared:
        if scheduler.let_time_pass():
            watch.begins, watch.notes, scheduler.next_look = steps, {}, steps + LENGTH
        else:
            why = f"no word that a waiting thread looks at has changed in {steps - scheduler.stirred:,} operations"
    elif verdict and quiet > LONG:
        why = f"{quiet:,} operations, and the same ones repeat"
    else:
        scheduler.next_look = steps + (steps - watch.begins)
    if why:
        scheduler.detector = watch.inner
        scheduler.hang(why)
