"""Who touched which bytes last, and whether two accesses race.

An *actor* is whoever has a program order: a CUDA thread, or the engine that does a bulk copy. A vector clock says for
each actor up to which of its times others have come to know it. Two overlapping accesses, one a write, race unless

* causality orders them: program order, barriers, launches, and release patterns that synchronise with acquire patterns;
* a strong read that causality orders before the second access observed the first, a strong write; or
* they are morally strong: both strong, of equal address and size, each one's scope including the other's actor.

Memory is kept in granules of 16 bytes, which no aligned access crosses; the bytes of a granule are bits of a mask.
An access is a tuple (fields below): this is the simulator's hottest data.

Most accesses are plain loads, and most of those cannot race with what was written so far: those of a span that nobody
has written yet (parameters, inputs) are only listed, and of those who know the same (the lanes of a warp behind a
barrier) one looks at the writes of a granule for all.
"""
from itertools import count

import numpy as np

from epmoe_ref.errors import RaceError

from . import race_report

WEAK, CTA, GPU, SYS = 0, 1, 2, 3
# fields of an access
ACTOR, TIME, SCOPE, ADDRESS, SIZE, WRITE, WORD, CODE, PLACE, CALLER, CALLER_PLACE, NUMBER = range(12)
WRITES, READS, CHECKED_FOR, CHECKED, THIN_AT = range(5)      # of a granule's cell
MASKS = {1 << i: (1 << (1 << i)) - 1 for i in range(5)}
ALL = 0xFFFF                # the mask of a whole granule
SCOPE_BIT, IDX_BIT = 16, 18     # where these begin in the key of an access, behind its mask
LISTED = 50_000             # reads of a span that are listed before they are sorted into granules
FULL = 256                  # reads of a granule that are kept before those that say the same are dropped
new_lore = count(1).__next__


class Actor:
    """One thread of one launch, with its clocks: `time` is its own, `base` what it knows of everybody else.

    `base` is never changed in place, so that actors can share it after a barrier; `known` is a memoryview of it, which
    is faster to index. Actors whose bases are equal may have one `lore`, a number. `proxy` is what bulk copies issued
    by it may rely on. `idx` is its place in the vectors.
    """

    __slots__ = ("idx", "time", "base", "known", "lore", "proxy", "rank", "block", "tid", "launch", "start", "fences",
                 "observed", "seen", "word", "engines", "issued", "committed", "read_waited")

    def __init__(self, idx, base, block, tid, word=None, lore=None):
        self.idx, self.block, self.tid, self.word = idx, block, tid, word
        self.lore = lore or new_lore()
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
        self.known, self.lore = memoryview(base), new_lore()
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
        # address >> 4 -> cell: writes (mask | scope | idx -> access), list of reads; for whom (a lore) no write
        # to which bytes (a mask) race with a weak read; and how many reads are many
        self.granules = {}
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
            cell = self.granules[address >> 4] = [{}, [], 0, 0, FULL]
        mask = MASKS[n] << (address & 15)
        if write:
            old = cell[0].get(a.idx << IDX_BIT | mask)
            if old is not None and old[1] == a.time:        # same epoch: already checked
                return
        back = frame.f_back
        access = (a, a.time, 0, address, n, write, word, frame.f_code, frame.f_lasti, back.f_code, back.f_lasti, 0)
        if write:
            self.check_write(access, cell, mask, span)
            cell[0][a.idx << IDX_BIT | mask] = access
            cell[2] = 0
        else:
            if cell[2] != a.lore or mask & ~cell[3] or nc:
                self.check_read(access, cell, mask, span, nc)
            cell[1].append(access)
        if span.host_accesses:
            self.check_host(access, span)

    def check_read(self, access, cell, mask, span, nc):
        """A weak read against the last writes; remember whose reads need not be checked again before the next write."""
        a = access[ACTOR]
        me, by_base = a.idx, not nc
        known = a.known if not nc else memoryview(a.launch.base)
        for k, old in cell[WRITES].items():
            if k & mask:
                i = old[0].idx
                if i == me and not nc:
                    by_base = False         # its own writes are no others' to know of
                elif known[i] < old[1]:
                    by_base = False
                    if not self.was_observed(old, a):
                        self.race(old, access, span, "nc" if nc and a.known[i] >= old[1] or i == me else None)
        if by_base:
            cell[CHECKED] = mask | (cell[CHECKED] if cell[CHECKED_FOR] == a.lore else 0)
            cell[CHECKED_FOR] = a.lore
        if len(cell[READS]) > cell[THIN_AT]:
            self.thin(cell)

    def check_write(self, access, cell, mask, span):
        """A weak write against the last accesses; those that it overwrites are forgotten."""
        a, writes, reads = access[ACTOR], cell[WRITES], cell[READS]
        address, end = access[ADDRESS], access[ADDRESS] + access[SIZE]
        me, known = a.idx, a.known
        for k, old in writes.items():
            if k & mask:
                i = old[0].idx
                if i != me and known[i] < old[1] and not self.was_observed(old, a):
                    self.race(old, access, span)
        for old in reversed(reads):             # of an actor's reads the last is to be told of
            if old[3] < end and address < old[3] + old[4]:
                i = old[0].idx
                if i != me and known[i] < old[1]:
                    self.race(old, access, span)
        if writes or reads:
            self.forget(cell, address, end)
        if address >> 4 in self.strong_granules:
            self.weak_write(address, access[SIZE], access)

    @staticmethod
    def thin(cell):
        """Of an actor's reads of the same bytes the last one says all."""
        cell[READS] = list({(old[0].idx, old[2], old[3], old[4]): old for old in cell[READS]}.values())
        cell[THIN_AT] = max(FULL, 2 * len(cell[READS]))

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
        """Enter the listed reads of a span into its granules."""
        reads, granules = self.unwritten.get(span, ()), self.granules
        for access in reads:
            address = access[ADDRESS]
            cell = granules.get(address >> 4)
            if cell is None:
                cell = granules[address >> 4] = [{}, [], 0, 0, FULL]
            cell[1].append(access)
            if len(cell[1]) > cell[4]:
                self.thin(cell)
        if reads:
            reads.clear()

    @staticmethod
    def forget(cell, address, end):
        """Older accesses to bytes that a weak write has overwritten, all of them ordered before it, count no longer."""
        others = ~((1 << end - address) - 1 << (address & 15))
        writes = cell[WRITES]
        gone = [k for k in writes if not k & others & ALL]
        if len(gone) == len(writes):
            writes.clear()
        else:
            for k in gone:
                del writes[k]
        if cell[READS]:
            cell[READS] = [old for old in cell[READS] if old[3] < address or old[3] + old[4] > end]

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
            cell = self.granules[address >> 4] = [{}, [], 0, 0, FULL]
        mask, end = MASKS[n] << (address & 15), address + n
        me, known, others = a.idx, a.known, ALL & ~mask
        # before a strong write, the last strong accesses of its rank are forgotten; a weak access before stays: strong
        # ones after this may race with it without racing with this
        gone = []
        for k, old in cell[WRITES].items():
            if k & mask:
                i = old[0].idx
                if i == me or known[i] >= old[1]:
                    if write and old[2] and old[0].rank == a.rank and not k & others:
                        gone.append(k)
                elif not morally_strong(old, access) and not self.was_observed(old, a):
                    self.race(old, access, span)
        for k in gone:
            del cell[WRITES][k]
        key = me << IDX_BIT | access[SCOPE] << SCOPE_BIT | mask
        if write:
            gone = False
            for old in reversed(cell[READS]):
                if old[3] < end and address < old[3] + old[4]:
                    i = old[0].idx
                    if i == me or known[i] >= old[1]:
                        gone = gone or old[2]
                    elif not morally_strong(old, access):
                        self.race(old, access, span)
            if gone:
                cell[READS] = [old for old in cell[READS] if not (
                    old[2] and old[0].rank == a.rank and address <= old[3] and old[3] + old[4] <= end
                    and (old[0].idx == me or known[old[0].idx] >= old[1]))]
            cell[WRITES][key] = access
            cell[CHECKED_FOR] = 0
        else:
            cell[READS].append(access)
            if len(cell[READS]) > cell[THIN_AT]:
                self.thin(cell)
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
