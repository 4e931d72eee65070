"""Actors and accesses: the data of the race detector.

An *actor* is anything with a program order: a CUDA thread, or the engine of a bulk copy. A vector clock holds, for each
actor, the latest of its times that is known. An access is a tuple for speed: no other data of the simulator is so hot.
"""

from itertools import count

import numpy as np

WEAK, CTA, GPU, SYS = 0, 1, 2, 3
# fields of an access. NUMBER counts strong accesses; a weak access has the number of the last strong one before, or 0
ACTOR, TIME, SCOPE, ADDRESS, SIZE, WRITE, WORD, CODE, PLACE, CALLER, CALLER_PLACE, NUMBER = range(12)
new_lore = count(1).__next__


class Actor:
    """One thread of one launch, with its clocks: `time` is its own, `base` its knowledge of all other actors.

    `base` is never changed in place, so actors can share it after a barrier. `known` is a memoryview of it, which is
    faster to index. Actors with equal bases may share a `lore`, a number. `proxy` is the clock that bulk copies issued
    by this actor may rely on. `idx` is its index in the vectors.
    """

    __slots__ = (
        "idx time base known lore proxy rank block tid launch start fences observed released seen "
        "reader word engines issued committed read_waited"
    ).split()

    def __init__(self, idx, base, block, tid, word=None, lore=None):
        self.idx, self.block, self.tid, self.word = idx, block, tid, word
        self.lore = lore or new_lore()
        self.rank, self.launch = block.rank, block.launch
        self.base = self.proxy = base
        self.known = memoryview(base)
        self.time = self.start = self.known[idx] + 1
        self.fences = {}  # scope -> (clock, proxy) at the last fence
        # release heads that a strong read saw and did not acquire; a later fence, or a later acquire there, may
        self.observed = {}  # location -> (idx, scope) of the release -> head
        self.released = {}  # location -> scope -> head of the last release there
        self.seen = {}  # look (location, scope, acquire) -> version and time of the last one
        self.reader = None  # the actor of the launch's non-coherent reads (reader_of)
        self.engines = None
        self.issued = self.committed = self.read_waited = 0

    def learn(self, clock, proxy=None):
        """Everything up to this clock happened before this actor's later operations."""
        self.base = base = np.maximum(self.base, clock)
        self.known, self.lore = memoryview(base), new_lore()
        if proxy is not None:
            self.proxy = np.maximum(self.proxy, proxy)

    def snapshot(self):
        """Clock that includes this actor's own operations."""
        clock = self.base.copy()
        clock[self.idx] = self.time
        return clock


def covers(scope, a, b):
    """Does `scope`, on an operation of actor a, include actor b? Scope gpu is the executing rank."""
    return a is b or scope == SYS or a.rank == b.rank and (scope == GPU or scope == CTA and a.block is b.block)


def morally_strong(a, b):
    """True if two accesses are strong, to the same word, and each within the other's scope."""
    return (
        a[SCOPE]
        and b[SCOPE]
        and a[ADDRESS] == b[ADDRESS]
        and a[SIZE] == b[SIZE]
        and covers(a[SCOPE], a[ACTOR], b[ACTOR])
        and covers(b[SCOPE], b[ACTOR], a[ACTOR])
    )


class Location:
    """The writes and release heads that a strong read of these bytes can synchronise with."""

    __slots__ = ("address size end last base heads chain links observations version history overlaps").split()

    def __init__(self, address, size):
        self.address, self.size, self.end = address, size, address + size
        self.last = None  # the last write (access) to any of the bytes, including weak ones
        self.base = None  # what its actor knew then
        self.heads = {}  # (idx of the releasing actor, scope) -> (actor, scope, clock, access, proxy)
        self.chain = 0  # number of the first write of the chain of atomics that `last` belongs to
        self.links = {}  # actor and site -> (access, base) of each write of a chain of several that releases nothing
        # (first and last write of the chain that was seen, idx of the reader, its time)
        self.observations = []
        self.version = 0
        self.history = None  # stale mode: a list of (write, heads, value, chain), oldest first
        self.overlaps = ()  # other locations that share bytes with it

    def overwritten(self, access):
        """After a weak write, or one of another size, strong reads here cannot acquire anything older."""
        self.last, self.base, self.heads, self.links, self.history = access, access[ACTOR].base, {}, {}, None
        self.version += 1
