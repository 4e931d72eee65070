"""Remembers the last accesses to every byte, and decides whether two accesses race.

Two overlapping accesses, one a write, race unless

* causality orders them: program order, barriers, launches, and release patterns that synchronise with acquire patterns;
* a strong read that causality orders before the second access observed the first, a strong write; or
* they are morally strong: both strong, of equal address and size, each one's scope including the other's actor.

A read through the non-coherent path (load16_nc) counts as lasting from the beginning of its launch to its end.

Memory is tracked in granules of 16 bytes. No aligned access crosses a granule. A mask has one bit for each of its
bytes. An access is forgotten only if every later access that races with it also races with a remembered one. So the
first race of a run is always found. tests/oracle/ptx_model.py states the same rules without this bookkeeping.

Most accesses are plain loads, and most of these cannot race with earlier writes. Loads from a span that no thread has
written yet (parameters, inputs) are only listed. If several actors have the same knowledge (the lanes of a warp after a
barrier), a granule's writes are compared with one of them for all.
"""

from epmoe_ref.errors import RaceError

from . import race_report
from .actors import ACTOR, ADDRESS, CODE, NUMBER, PLACE, SCOPE, SIZE, WORD, WRITE, Actor, morally_strong

# fields of a granule's cell: the last writes (key -> access); weak reads (a list); the lore and the mask of bytes for
# which no write races with a weak read; how many weak reads are too many; strong reads (key -> access, or None);
# hidden: strong writes that the same actor has replaced by others outside their chain (a list, or None)
WRITES, READS, CHECKED_FOR, CHECKED, THIN_AT, STRONG_READS, HIDDEN = range(7)
MASKS = {1 << i: (1 << (1 << i)) - 1 for i in range(5)}
ALL = 0xFFFF  # the mask of a whole granule
SCOPE_BIT, IDX_BIT = 16, 18  # where scope and idx begin in the key of an access, after its mask
LISTED = 50_000  # reads of a span that are listed before they are sorted into granules
FULL = 256  # reads of a granule that are kept before redundant ones are dropped


def new_cell():
    """The cell of an untouched granule."""
    return [{}, [], 0, 0, FULL, None, None]


class Accesses:
    """The last accesses to every granule, and the check of each new one against them."""

    def __init__(self, machine):
        self.machine = machine
        self.granules = {}  # address >> 4 -> cell
        self.locations = {}  # address << 4 | size -> Location
        self.strong_granules = {}  # address >> 4 -> its locations
        self.number = 0
        self.pairs = set()
        self.unwritten = {}  # span without writes in this run -> its plain reads
        self.written = set()  # all other spans that were touched

    def plain(self, a, address, n, write, word, frame, span, nc=False):
        """A weak access of a thread."""
        if span not in self.written:
            if not write:
                self.read_unwritten(a if not nc else self.reader_of(a), address, n, word, frame, span)
                return
            self.first_write(span)
        cell = self.granules.get(address >> 4)
        if cell is None:
            cell = self.granules[address >> 4] = new_cell()
        mask = MASKS[n] << (address & 15)
        if write:
            old = cell[0].get(a.idx << IDX_BIT | mask)
            if old is not None and old[1] == a.time:  # same epoch: already checked
                return
        back = frame.f_back
        code, number = frame.f_code, self.number
        access = (a, a.time, 0, address, n, write, word, code, frame.f_lasti, back.f_code, back.f_lasti, number)
        if write:
            self.check_write(access, cell, mask, span)
            cell[0][a.idx << IDX_BIT | mask] = access
            cell[2] = 0
        else:
            if nc:
                access = self.read_nc(access, cell, mask, span)
            elif cell[2] != a.lore or mask & ~cell[3]:
                self.check_read(access, cell, mask, span)
            cell[1].append(access)
        if span.host_accesses:
            self.check_host(access, span)

    def check_read(self, access, cell, mask, span):
        """Check a weak read against the last writes. Remember which actors need no check before the next write."""
        a = access[ACTOR]
        me, known, by_base, by_sight = a.idx, a.known, True, False
        for k, old in cell[WRITES].items():
            if k & mask:
                i = old[0].idx
                if i == me:
                    by_base = False  # an actor always knows its own writes
                elif known[i] < old[1]:
                    by_base = False
                    if self.was_observed(old, known, me):
                        by_sight = True
                    else:
                        self.race(old, access, span)
        if by_sight and cell[HIDDEN]:
            self.check_hidden(access, cell, span, known, me)
        if by_base:
            cell[CHECKED] = mask | (cell[CHECKED] if cell[CHECKED_FOR] == a.lore else 0)
            cell[CHECKED_FOR] = a.lore
        if len(cell[READS]) > cell[THIN_AT]:
            self.thin(cell)

    def read_nc(self, access, cell, mask, span):
        """A non-coherent read may see bytes as of the beginning of its launch. Returns it as the launch's read."""
        reader = self.reader_of(access[ACTOR])
        access, known = (reader, reader.time) + access[SCOPE:], memoryview(reader.base)
        for k, old in cell[WRITES].items():
            if k & mask and known[old[0].idx] < old[1]:
                self.race(old, access, span, "nc")
        return access

    def check_write(self, access, cell, mask, span):
        """Check a weak write against the last accesses, and forget those that it overwrites."""
        a, writes, reads, by_sight = access[ACTOR], cell[WRITES], cell[READS], False
        address, end = access[ADDRESS], access[ADDRESS] + access[SIZE]
        me, known = a.idx, a.known
        for k, old in writes.items():
            if k & mask:
                i = old[0].idx
                if i != me and known[i] < old[1]:
                    if self.was_observed(old, known, me):
                        by_sight = True
                    else:
                        self.race(old, access, span)
        if by_sight and cell[HIDDEN]:
            self.check_hidden(access, cell, span, known, me)
        for old in reversed(reads):  # report the last of an actor's reads
            if old[3] < end and address < old[3] + old[4]:
                i = old[0].idx
                if i != me and known[i] < old[1]:
                    self.race(old, access, span)
        if cell[STRONG_READS]:
            for k, old in cell[STRONG_READS].items():
                if k & mask and old[0].idx != me and known[old[0].idx] < old[1]:
                    self.race(old, access, span)
        if writes or reads or cell[STRONG_READS]:
            self.forget(cell, address, end)
        if address >> 4 in self.strong_granules:
            self.weak_write(address, access[SIZE], access)

    def check_hidden(self, access, cell, span, known, me):
        """Check strong writes that the same actor has replaced. Having seen the later write is not having seen these.

        An access can race with these and not with the later write only if observation alone orders it after that write.
        """
        start, end = access[ADDRESS], access[ADDRESS] + access[SIZE]
        for old in cell[HIDDEN]:
            i = old[0].idx
            if (
                old[3] < end
                and start < old[3] + old[4]
                and i != me
                and known[i] < old[1]
                and not morally_strong(old, access)
                and not self.was_observed(old, known, me)
            ):
                self.race(old, access, span)

    def reader_of(self, a):
        """The actor of a launch's non-coherent reads. A thread that knows of them knows that the launch has ended."""
        if a.reader is None:
            launch = a.launch
            a.reader = Actor(self.launch_ends_at + launch.stream_index, launch.base, a.block, a.tid)
            a.reader.time = launch.ordinal
        return a.reader

    @staticmethod
    def thin(cell):
        """Keep only the last of an actor's reads of the same bytes."""
        cell[READS] = list({(old[0].idx, old[2], old[3], old[4]): old for old in cell[READS]}.values())
        cell[THIN_AT] = max(FULL, 2 * len(cell[READS]))

    def read_unwritten(self, a, address, n, word, frame, span):
        """A weak read of a span without writes in this run: it cannot race yet.

        a: the reading actor.
        """
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
        """Called before the first write of a span in this run."""
        for other in [s for s in self.unwritten if s.low < span.high and span.low < s.high] + [span]:
            self.sort_reads(other)
            self.written.add(other)
            self.unwritten.pop(other, None)

    def sort_reads(self, span):
        """Move the listed reads of a span into its granules."""
        reads, granules = self.unwritten.get(span, ()), self.granules
        for access in reads:
            address = access[ADDRESS]
            cell = granules.get(address >> 4)
            if cell is None:
                cell = granules[address >> 4] = new_cell()
            cell[1].append(access)
            if len(cell[1]) > cell[4]:
                self.thin(cell)
        if reads:
            reads.clear()

    @staticmethod
    def forget(cell, address, end):
        """Forget older accesses to bytes that a weak write has overwritten. All of them are ordered before it."""
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
        if cell[STRONG_READS]:
            cell[STRONG_READS] = {
                k: old for k, old in cell[STRONG_READS].items() if old[3] < address or old[3] + old[4] > end
            }
        if cell[HIDDEN]:
            cell[HIDDEN] = [old for old in cell[HIDDEN] if old[3] < address or old[3] + old[4] > end]

    def weak_write(self, address, n, access):
        """After a weak write, strong reads of these bytes cannot acquire anything older."""
        for location in self.strong_granules[address >> 4]:
            if location.address < address + n and address < location.end:
                location.overwritten(access)
                if address <= location.address and location.end <= address + n:
                    location.observations = []

    def check_strong(self, access, span, chain):
        """Check a strong access against the last ones, then remember it. chain: the first write of its atomics chain."""
        a, address, n, write = access[ACTOR], access[ADDRESS], access[SIZE], access[WRITE]
        if write and span not in self.written:
            self.first_write(span)
        cell = self.granules.get(address >> 4)
        if cell is None:
            cell = self.granules[address >> 4] = new_cell()
        mask, end, scope = MASKS[n] << (address & 15), address + n, access[SCOPE]
        me, known, by_sight = a.idx, a.known, False
        for k, old in cell[WRITES].items():
            if k & mask:
                i = old[0].idx
                if i != me and known[i] < old[1] and not morally_strong(old, access):
                    if self.was_observed(old, known, me):
                        by_sight = True
                    else:
                        self.race(old, access, span)
        if by_sight and cell[HIDDEN]:
            self.check_hidden(access, cell, span, known, me)
        key = me << IDX_BIT | scope << SCOPE_BIT | mask
        strong_reads = cell[STRONG_READS]
        if write:
            for old in reversed(cell[READS]):
                if old[3] < end and address < old[3] + old[4]:
                    i = old[0].idx
                    if i != me and known[i] < old[1]:
                        self.race(old, access, span)
            if strong_reads:
                for k, old in strong_reads.items():
                    if k & mask:
                        i = old[0].idx
                        if i != me and known[i] < old[1] and not morally_strong(old, access):
                            self.race(old, access, span)
            writes = cell[WRITES]
            replaced = writes.get(key)
            if replaced is not None and replaced[NUMBER] < chain:
                self.hide(cell, replaced)
            writes[key] = access
            cell[CHECKED_FOR] = 0
        elif strong_reads is None:
            cell[STRONG_READS] = {key: access}
        else:
            strong_reads[key] = access
        if span.host_accesses:
            self.check_host(access, span)

    @staticmethod
    def hide(cell, access):
        """Keep a strong write that its actor replaces. If there are very many, drop the oldest."""
        hidden = cell[HIDDEN]
        if hidden is None:
            hidden = cell[HIDDEN] = []
        hidden.append(access)
        if len(hidden) > FULL:
            del hidden[: FULL // 2]

    def was_observed(self, old, known, me):
        """Whether a strong read, ordered before `me`, saw the strong write `old` or an atomic of its chain."""
        if not old[SCOPE] or not old[WRITE]:
            return False
        number = old[NUMBER]
        for first, last, z, time in self.locations[old[ADDRESS] << 4 | old[SIZE]].observations:
            if first <= number <= last and (z == me or known[z] >= time):
                return True
        return False

    def last_writes(self, address):
        """The writes of this run to the byte at an address that no later one has replaced, the last one at the end."""
        cell = self.granules.get(address >> 4)
        writes = [] if cell is None else [w for k, w in cell[WRITES].items() if k >> (address & 15) & 1]
        return sorted(writes, key=lambda w: w[NUMBER])

    def check_host(self, access, span):
        for low, high, write, count, at in span.host_accesses:
            if (
                (write or access[WRITE])
                and access[ADDRESS] < high
                and access[ADDRESS] + access[SIZE] > low
                and access[ACTOR].launch.number <= count
            ):
                self.report(race_report.with_host(access, span, write, at))

    def race(self, first, second, span, kind=None):
        pair = (first[CODE], first[PLACE], second[CODE], second[PLACE])
        if pair not in self.pairs:
            self.pairs.add(pair)
            if first[WORD] == "load16_nc" and second[ACTOR].launch.stream is first[ACTOR].launch.stream:
                kind = "later"
            self.report(race_report.text(self, first, second, span, kind))

    def report(self, text):
        self.machine.races.append(text)
        if self.machine.stop_at_first_race:
            raise RaceError(text)
