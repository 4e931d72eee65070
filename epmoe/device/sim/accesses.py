"""Who touched which bytes last, and whether two accesses race.

An *actor* is whoever has a program order: a CUDA thread, or the engine that does a bulk copy. A vector clock says for
each actor up to which of its times others have come to know it. Two overlapping accesses, one a write, race unless

* causality orders them: program order, barriers, launches, and release patterns that synchronise with acquire patterns;
* a strong read that causality orders before the second access observed the first, a strong write; or
* they are morally strong: both strong, of equal address and size, each one's scope including the other's actor.

Memory is kept in granules of 16 bytes, which no aligned access crosses; the bytes of a granule are bits of a mask.
An access is a tuple (fields below): this is the simulator's hottest data.

Most plain loads are of memory that no kernel of the run ever writes (parameters, inputs): those of a span are only
listed until somebody writes it.
"""
import numpy as np

from epmoe_ref.errors import RaceError

from . import race_report

WEAK, CTA, GPU, SYS = 0, 1, 2, 3
# fields of an access
ACTOR, TIME, SCOPE, ADDRESS, SIZE, WRITE, WORD, CODE, PLACE, CALLER, CALLER_PLACE, NUMBER = range(12)
MASKS = {1 << i: (1 << (1 << i)) - 1 for i in range(5)}
ALL = 0xFFFF                # the mask of a whole granule
SCOPE_BIT, IDX_BIT = 16, 18     # where these begin in the key of an access, behind its mask
LISTED = 50_000             # reads of a span that are listed before they are sorted into granules


class Actor:
    """One thread of one launch, with its clocks: `time` is its own, `base` what it knows of everybody else.

    `base` is never changed in place, so that actors can share it after a barrier; `known` is a memoryview of it, which
    is faster to index. `proxy` is what bulk copies issued by it may rely on. `idx` is its place in the vectors.
    """

    __slots__ = ("idx", "time", "base", "known", "proxy", "rank", "block", "tid", "launch", "start", "fences",
                 "observed", "seen", "word", "engines", "issued", "committed", "read_waited")

    def __init__(self, idx, base, block, tid, word=None):
        self.idx, self.block, self.tid, self.word = idx, block, tid, word
        self.rank, self.launch = block.rank, block.launch
        self.base = self.proxy = base
        self.known = memoryview(base)
        self.time = self.start = self.known[idx] + 1
        self.fences = {}            # scope -> (clock, proxy) at the last fence
        self.observed = []          # release heads seen by loads that did not acquire: a later fence may
        self.seen = {}              # address -> version of it that was last read
        self.engines = None
        self.issued = self.committed = self.read_waited = 0

    def learn(self, clock, proxy=None):
        """Everything up to this clock happened before what follows."""
        self.base = base = np.maximum(self.base, clock)
        self.known = memoryview(base)
        if proxy is not None:
            self.proxy = np.maximum(self.proxy, proxy)

    def snapshot(self):
        """Clock that includes what this actor itself has done."""
        clock = self.base.copy()
        clock[self.idx] = self.time
        return clock


def covers(scope, a, b):
    """Does `scope`, on an operation of actor a, include actor b? Scope gpu is the executing rank."""
    return a is b or scope == SYS or a.rank == b.rank and (scope == GPU or scope == CTA and a.block is b.block)


def morally_strong(a, b):
    """Whether two accesses are strong, to the same word, and each within the other's scope."""
    return (a[SCOPE] and b[SCOPE] and a[ADDRESS] == b[ADDRESS] and a[SIZE] == b[SIZE]
            and covers(a[SCOPE], a[ACTOR], b[ACTOR]) and covers(b[SCOPE], b[ACTOR], a[ACTOR]))


class Location:
    """What a strong read of this address can synchronise with."""

    __slots__ = ("size", "last", "heads", "observations", "version", "history")

    def __init__(self, size):
        self.size = size
        self.last = None            # the last write (access), weak ones included
        self.heads = {}             # (idx of the releasing actor, scope) -> (actor, scope, clock, access, proxy)
        self.observations = []      # (number of the write, idx of the reader, its time)
        self.version = 0
        self.history = []           # stale mode: (write, heads, value), oldest first


class Accesses:
    """The last accesses to every granule, and the check of each new one against them."""

    def __init__(self, machine):
        self.machine = machine
        self.granules = {}          # address >> 4 -> (writes, reads): mask | scope | idx (below) -> access
        self.locations = {}         # address -> Location
        self.strong_granules = {}   # address >> 4 -> addresses of its locations
        self.number = 0
        self.pairs = set()
        self.unwritten = {}         # span that nobody has written in this run -> its plain reads
        self.written = set()        # all other spans that were touched

    def plain(self, a, address, n, write, word, frame, span, nc=False):
        """A weak access of a thread."""
        if span not in self.written:
            if not write:
                self.read_unwritten(a, address, n, word, frame, span)
                return
            self.first_write(span)
        cell = self.granules.get(address >> 4)
        if cell is None:
            cell = self.granules[address >> 4] = ({}, {})
        mask = MASKS[n] << (address & 15)
        me = a.idx
        key = me << IDX_BIT | mask
        writes, reads = cell
        table = writes if write else reads
        old = table.get(key)
        time = a.time
        if old is not None and old[1] == time and not nc:          # same epoch: already checked
            return
        back = frame.f_back
        access = (a, time, 0, address, n, write, word, frame.f_code, frame.f_lasti, back.f_code, back.f_lasti, 0)
        known = a.known if not nc else memoryview(a.launch.base)
        for k, old in writes.items():
            if k & mask:
                i = old[0].idx
                if (i != me or nc) and known[i] < old[1] and not self.was_observed(old, a):
                    self.race(old, access, span, "nc" if nc and a.known[i] >= old[1] or i == me else None)
        if write:
            for k, old in reads.items():
                if k & mask:
                    i = old[0].idx
                    if i != me and known[i] < old[1]:
                        self.race(old, access, span)
            if writes:
                self.forget(writes, mask)
            if reads:
                self.forget(reads, mask)
            if address >> 4 in self.strong_granules:
                self.weak_write(address, n, access)
        table[key] = access
        if span.host_accesses:
            self.check_host(access, span)

    def read_unwritten(self, a, address, n, word, frame, span):
        """A weak read of a span that nobody has written in this run: there is nothing yet that it could race with."""
        reads = self.unwritten.get(span)
        if reads is None:
            reads = self.unwritten[span] = []
        back = frame.f_back
        reads.append((a, a.time, 0, address, n, False, word, frame.f_code, frame.f_lasti, back.f_code, back.f_lasti, 0))
        if span.host_accesses and a.launch.number <= span.host_accesses[-1][3]:
            self.check_host(reads[-1], span)
        if len(reads) > LISTED:
            self.sort_reads(span)

    def first_write(self, span):
        """Somebody is about to write a span for the first time in this run."""
        for other in [s for s in self.unwritten if s.low < span.high and span.low < s.high] + [span]:
            self.sort_reads(other)
            self.written.add(other)
            self.unwritten.pop(other, None)

    def sort_reads(self, span):
        """Enter the listed reads of a span into its granules, one for each epoch of a thread."""
        reads, granules = self.unwritten.get(span, ()), self.granules
        for access in reads:
            address = access[ADDRESS]
            cell = granules.get(address >> 4)
            if cell is None:
                cell = granules[address >> 4] = ({}, {})
            key = access[ACTOR].idx << IDX_BIT | MASKS[access[SIZE]] << (address & 15)
            old = cell[1].get(key)
            if old is None or old[TIME] != access[TIME] or old[ACTOR] is not access[ACTOR]:
                cell[1][key] = access
        if reads:
            reads.clear()

    def forget(self, table, mask):
        """Older accesses to bytes that a weak write has overwritten, all of them ordered before it, count no longer."""
        others = ALL & ~mask
        gone = [k for k in table if not k & others]
        if len(gone) == len(table):
            table.clear()
        else:
            for k in gone:
                del table[k]

    def weak_write(self, address, n, access):
        """A weak write ends what strong reads there could acquire."""
        for at in self.strong_granules[address >> 4]:
            location = self.locations[at]
            if at < address + n and address < at + location.size:
                location.last, location.heads, location.observations, location.history = access, {}, [], []
                location.version += 1

    def check_strong(self, access, span):
        """A strong access against the last ones, then remember it."""
        a, address, n, write = access[ACTOR], access[ADDRESS], access[SIZE], access[WRITE]
        if write and span not in self.written:
            self.first_write(span)
        cell = self.granules.get(address >> 4)
        if cell is None:
            cell = self.granules[address >> 4] = ({}, {})
        mask = MASKS[n] << (address & 15)
        me, known, others = a.idx, a.known, ALL & ~mask
        for table in cell if write else cell[:1]:
            gone = None
            for k, old in table.items():
                if not k & mask:
                    continue
                i = old[0].idx
                if i == me or known[i] >= old[1]:
                    # a weak access before stays: strong ones after this may race with it without racing with this
                    if write and old[2] and old[0].rank == a.rank and not k & others:
                        gone = [k] if gone is None else gone + [k]
                elif not morally_strong(old, access) and not self.was_observed(old, a):
                    self.race(old, access, span)
            if gone:
                for k in gone:
                    del table[k]
        cell[0 if write else 1][me << IDX_BIT | access[SCOPE] << SCOPE_BIT | mask] = access
        if span.host_accesses:
            self.check_host(access, span)

    def was_observed(self, old, a):
        """Has a strong read that comes before what a does now seen the strong write `old` (or a later one)?"""
        if not old[SCOPE] or not old[WRITE] or old[ADDRESS] not in self.locations:
            return False
        number, known, me = old[NUMBER], a.known, a.idx
        return any(n >= number and (z == me or known[z] >= time)
                   for n, z, time in self.locations[old[ADDRESS]].observations)

    def check_host(self, access, span):
        for low, high, write, count in span.host_accesses:
            if (write or access[WRITE]) and access[ADDRESS] < high and access[ADDRESS] + access[SIZE] > low \
                    and access[ACTOR].launch.number <= count:
                self.report(race_report.with_host(access, span, write))

    def race(self, first, second, span, kind=None):
        pair = (first[CODE], first[PLACE], second[CODE], second[PLACE])
        if pair not in self.pairs:
            self.pairs.add(pair)
            self.report(race_report.text(self, first, second, span, kind))

    def report(self, text):
        self.machine.races.append(text)
        if self.machine.stop_at_first_race:
            raise RaceError(text)
