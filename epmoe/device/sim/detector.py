"""The race detector: how synchronisation updates vector clocks, as in the PTX memory model.

Each location of strong operations keeps its release heads: (releasing actor, scope, clock). A strong store replaces
them. An RMW that is morally strong with the previous write continues them. A strong write carries the clock of every
fence of its thread, with the fence's scope, and the clocks of the thread's releases at this location. An acquire takes
every head for which each scope includes the other actor. A relaxed load keeps them for a later fence, or for a later
acquire of the same location. Barriers and syncwarp join clocks. Shuffles and ballots do not. Launches of a stream
follow one another. The host waits for everything at the beginning and end of a run, so nothing older is remembered.
"""

import numpy as np

from .accesses import Accesses
from .actors import Actor, Location, covers, morally_strong, new_lore
from .async_proxy import ENGINES_PER_WARP, AsyncProxy
from .network_agents import NetworkAgents

SCOPE_NAMES = ("weak", "cta", "gpu", "sys")
PURE_STORES = {
    "st_%s_%s_%s" % (order, scope, ty)
    for order in ("relaxed", "release")
    for scope in SCOPE_NAMES[1:]
    for ty in ("i32", "u32", "u64")
} | {"shmem_signal_set"}
APART = "scopes %s and %s do not include each other's thread"


class Detector(NetworkAgents, AsyncProxy, Accesses):
    """Sees every operation of one run. `queues`: the launches of each stream; `stale`: a random.Random or None."""

    def __init__(self, machine, queues, stale=None):
        super().__init__(machine)
        self.stale = stale
        self.fenced_proxy = False  # whether any thread has executed fence_proxy_async
        # pairs that did not synchronise, for reports: sites and blocks -> (write, read, why, what the writer knew)
        self.rejected = {}
        self.chains = {}  # read's site and block -> (read, number of the write it saw, that location's links)
        self.places = []  # by stream: clock index of its first thread, and of its first engine
        n = 0
        for queue in queues:
            threads = max(launch.grid * launch.threads for launch in queue)
            # a launch that knows nothing of the previous one must not have the same indices for its threads
            threads *= 1 + any(launch.programmatic for launch in queue)
            warps = max(launch.grid * ((launch.threads + 31) // 32) for launch in queue)
            self.places.append((n, n + threads))
            n += threads + warps * ENGINES_PER_WARP
        self.engines_end = self.launch_ends_at = n  # then one index a stream: how many of its launches have ended
        n += len(queues)
        if machine.network.heaps:
            n = self.new_agents(n)
        self.n = n
        self.stream_clock = [np.zeros(n, np.int32)] * len(queues)
        self.last = [None] * len(queues)  # launch of each stream
        self.engine_time = np.zeros(n, np.int32)

    # ------------------------------------------------------------------ launches and threads
    def launch_begins(self, launch):
        stream, (first, engines) = launch.stream_index, self.places[launch.stream_index]
        launch.base, last, self.last[stream] = self.stream_clock[stream], self.last[stream], launch
        launch.actors, launch.lore, launch.first = [], new_lore(), first
        launch.ordinal = last.ordinal + 1 if last is not None else 1
        if launch.programmatic and last is not None:
            launch.before = launch.base
            if last.before is None:  # else the last launch itself may have begun early
                launch.base = last.base
                launch.first = first + (engines - first) // 2 if last.first == first else first

    def block_begins(self, block):
        launch = block.launch
        first = launch.first + block.index * launch.threads
        for t in block.threads:
            t.actor = Actor(first + t.tid, launch.base, block, t.tid, lore=launch.lore)
            launch.actors.append(t.actor)
        block.actors = [t.actor for t in block.threads]

    def launch_before_has_ended(self, t):
        """The thread has waited for the launch before its own."""
        if t.launch.before is not None:
            t.actor.learn(t.launch.before)

    def launch_ends(self, launch):
        clock = self.join(launch.actors)
        if launch.before is not None:
            clock = np.maximum(clock, launch.before)
        _, engines = self.places[launch.stream_index]
        following = self.places[launch.stream_index + 1 : launch.stream_index + 2]
        after = following[0][0] if following else self.engines_end
        clock[engines:after] = np.maximum(clock[engines:after], self.engine_time[engines:after])
        clock[self.launch_ends_at + launch.stream_index] = launch.ordinal
        self.stream_clock[launch.stream_index] = clock

    # ------------------------------------------------------------------ joins
    def join(self, actors):
        """Clock of all operations of these actors."""
        bases = list({id(a.base): a.base for a in actors}.values())
        clock = bases[0].copy() if len(bases) == 1 else np.maximum.reduce(bases)
        of = memoryview(clock)
        for a in actors:
            of[a.idx] = a.time
        return clock

    def barrier(self, actors):
        """All of these actors meet and learn each other's operations."""
        clock = self.join(actors)
        known, lore, proxy = memoryview(clock), new_lore(), None
        if self.fenced_proxy:
            proxy = np.maximum.reduce(list({id(a.proxy): a.proxy for a in actors}.values()))
        for a in actors:
            a.base, a.known, a.lore = clock, known, lore
            a.time += 1
            if proxy is not None:
                a.proxy = proxy

    def fence(self, a, scope):
        """Acquire the releases that earlier strong loads observed, then remember the clock for later strong stores."""
        for location in list(a.observed):
            self.acquire_observed(a, location, scope)
        a.fences = {s: f for s, f in a.fences.items() if s > scope}
        a.fences[scope] = (a.snapshot(), a.proxy if self.fenced_proxy else None)
        a.time += 1

    def acquire_observed(self, a, location, scope):
        """After strong reads of the location, a fence or an acquire of it acquires the releases that they observed."""
        heads = a.observed.pop(location)
        rest = {k: h for k, h in heads.items() if not (covers(h[1], h[0], a) and covers(scope, a, h[0]))}
        for k, head in heads.items():
            if k not in rest:
                a.learn(head[2], head[4])
        if rest:
            a.observed[location] = rest

    # ------------------------------------------------------------------ strong operations
    def strong(self, a, address, n, read, write, scope, acquire, release, word, frame, span, before, after):
        """A strong load, store or RMW. before, after: values in memory. Returns the value that a load sees.

        acquire: None for a reduction. It continues a chain of atomics but is otherwise not a read.
        """
        place = address << 4 | n
        location = self.locations.get(place) or self.new_location(address, n)
        if not write and not self.stale:  # a spin reads the same value many times
            look, version = place << 3 | scope << 1 | acquire, location.version << 32 | a.time
            if a.seen.get(look) == version:
                return before
            a.seen[look] = version
        self.number += 1
        back = frame.f_back
        access = (
            a,
            a.time,
            scope,
            address,
            n,
            write,
            word,
            frame.f_code,
            frame.f_lasti,
            back.f_code,
            back.f_lasti,
            self.number,
        )
        last, heads, first, sees = location.last, location.heads, location.chain, False
        if self.stale and not write and location.history:
            last, heads, before, first = self.older(a, location)
        if read and last is not None:
            sees = morally_strong(last, access)
            if sees and acquire is not None:
                self.observe(a, location, access, acquire, scope, last, heads)
            elif not sees and acquire is not None:
                self.reject(
                    last,
                    access,
                    "the write is a plain store"
                    if not last[2]
                    else "they differ in size"
                    if last[3] != address or last[4] != n
                    else APART % (SCOPE_NAMES[last[2]], SCOPE_NAMES[scope]),
                    location.base,
                )
        if acquire and location in a.observed:
            self.acquire_observed(a, location, scope)
        chain = first if sees else self.number
        self.check_strong(access, span, chain)
        # after the check, because seeing a write does not order the read after it
        if sees and acquire is not None:
            location.observations.append((first, last[11], a.idx, access[1]))
        if write:
            if not read and before != after and last is not None and last[2] and last[6] in PURE_STORES:
                self.check_order(last, access, span)
            self.publish(a, location, access, scope, release, chain, before, after)
        return before

    def new_location(self, address, n):
        location = self.locations[address << 4 | n] = Location(address, n)
        others = self.strong_granules.get(address >> 4)
        if others is None:
            self.strong_granules[address >> 4] = [location]
            return location
        for other in others:  # aligned locations of one size have no bytes in common
            if other.size != n and other.address < location.end and address < other.end:
                location.overlaps += (other,)
                other.overlaps += (location,)
        others.append(location)
        return location

    def check_order(self, last, access, span):
        """Two strong stores of different values to a word must be ordered."""
        a, old = access[0], last[0]
        if old is not a and a.known[old.idx] < last[1] and not self.was_observed(last, a.known, a.idx):
            self.race(last, access, span, "order")

    def publish(self, a, location, access, scope, release, chain, before, after):
        """A strong write determines what its readers can acquire. chain: as in check_strong."""
        me, number = a.idx, access[11]
        keep = dict(location.heads) if chain < number else {}
        if location in a.released:
            for s, head in a.released[location].items():
                keep[me, s] = head
        heads = dict(keep)
        for s, (clock, proxy) in a.fences.items():
            newer = heads.get((me, s))
            if newer is None or newer[2][me] < clock[me]:
                heads[me, s] = (a, s, clock, access, proxy)
        if release:
            head = heads[me, scope] = (a, scope, a.snapshot(), access, a.proxy if self.fenced_proxy else None)
            a.released.setdefault(location, {})[scope] = head
        location.heads = heads
        if self.stale:
            if not location.history:
                location.history = [(location.last, keep, before, location.chain)]
            location.history.append((access, heads, after, chain))
        self.link(location, access, chain)
        location.last, location.base, location.chain = access, a.base, chain
        location.version += 1
        for other in location.overlaps:
            other.overwritten(access)
        if release:
            a.time += 1

    @staticmethod
    def link(location, access, chain):
        """For reports, keep the writes of a chain of atomics that release nothing: a read of the chain sees them too."""
        if chain == access[11]:
            location.links = {}
            return
        releasing = {k[0] for k in location.heads}
        first = () if location.links else ((location.last, location.base),)
        for write, base in (*first, (access, access[0].base)):
            if write[0].idx not in releasing:
                location.links[write[0].idx, write[7], write[8]] = (write, base)

    def observe(self, a, location, access, acquire, scope, write, heads):
        """A strong read saw a strong write, and each is in the other's scope."""
        writer = write[0].idx
        if not any(k[0] == writer for k in heads):
            base = location.base if write is location.last else write[0].base
            self.reject(write, access, "the write is relaxed", base)
        if location.links:
            self.chains[access[7], access[8], a.block] = (access, write[11], location.links)
        missed = {}
        for k, head in heads.items():
            if head[0] is a:
                continue
            if acquire and covers(head[1], head[0], a) and covers(scope, a, head[0]):
                a.learn(head[2], head[4])
            else:
                missed[k] = head
        if missed:
            a.observed.setdefault(location, {}).update(missed)
        for head in missed.values():  # after the others: a write may have a head for each scope
            self.reject(
                head[3],
                access,
                "the read is relaxed" if not acquire else APART % (SCOPE_NAMES[head[1]], SCOPE_NAMES[scope]),
                head[2],
            )

    def reject(self, write, read, why, base):
        """Remember a pair that did not synchronise, for reports. base: what the writer knew when it wrote."""
        w, r = write[0], read[0]
        if w is not r and r.known[w.idx] < write[1]:
            self.rejected[write[7], write[8], read[7], read[8], w.block, r.block] = (write, read, why, base)

    def not_synchronised(self):
        """Pairs as in `rejected`, those of chains of atomics included."""
        pairs = list(self.rejected.values())
        for read, seen, links in self.chains.values():
            for write, base in links.values():
                if write[11] <= seen and write[0] is not read[0] and read[0].known[write[0].idx] < write[1]:
                    pairs.append((write, read, "the write is relaxed", base))
        return pairs

    def older(self, a, location):
        """Stale mode: a write that this load may see, and that no earlier observation excludes."""
        history = location.history
        known = {last for _, last, z, time in location.observations if z == a.idx or a.known[z] >= time}
        low = len(history) - 1
        while low:
            write = history[low][0]
            if write is None or write[11] in known or write[0].idx == a.idx or a.known[write[0].idx] >= write[1]:
                break
            low -= 1
        return history[-1 if self.stale.random() < 0.5 else self.stale.randrange(low, len(history))]
