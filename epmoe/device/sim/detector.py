"""The race detector: how synchronisation moves vector clocks, as in the PTX memory model.

Each address of a strong operation keeps its release heads: (releasing actor, scope, clock). A strong store replaces
them, an RMW that is morally strong with the previous write continues them. A relaxed store after a fence carries the
fence's clock with the fence's scope. An acquire takes every head for which each scope includes the other actor; a
relaxed load keeps them for a later fence. Barriers and syncwarp join clocks, shuffles and ballots do not; launches of a
stream follow one another. A run begins and ends with the host waiting for everything, so nothing older is remembered.
"""
import numpy as np

from .accesses import Accesses, Actor, Location, covers, morally_strong, new_lore
from .async_proxy import AsyncProxy, ENGINES_PER_WARP
from .network_agents import NetworkAgents

SCOPE_NAMES = ("weak", "cta", "gpu", "sys")
PURE_STORES = {"st_%s_%s_%s" % (order, scope, ty) for order in ("relaxed", "release") for scope in SCOPE_NAMES[1:]
               for ty in ("i32", "u32", "u64")} | {"shmem_signal_set"}
APART = "scopes %s and %s do not include each other's thread"


class Detector(NetworkAgents, AsyncProxy, Accesses):
    """Sees every operation of one run. `queues`: the launches of each stream; `stale`: a random.Random or None."""

    def __init__(self, machine, queues, stale=None):
        super().__init__(machine)
        self.stale = stale
        self.fenced_proxy = False       # has anybody executed fence_proxy_async?
        self.rejected = {}              # (write's site, read's site, why) -> (write, read): what did not synchronise
        self.places = []                # by stream: first place of its threads, first place of its engines
        n = 0
        for queue in queues:
            threads = max(launch.grid * launch.threads for launch in queue)
            # a launch that knows nothing of the one before it must not have the places of its threads
            threads *= 1 + any(launch.programmatic for launch in queue)
            warps = max(launch.grid * ((launch.threads + 31) // 32) for launch in queue)
            self.places.append((n, n + threads))
            n += threads + warps * ENGINES_PER_WARP
        self.engines_end = n
        if machine.network.heaps:
            n = self.new_agents(n)
        self.n = n
        self.stream_clock = [np.zeros(n, np.int32)] * len(queues)
        self.last = [None] * len(queues)        # launch of each stream
        self.engine_time = np.zeros(n, np.int32)

    # ------------------------------------------------------------------ launches and threads
    def launch_begins(self, launch):
        stream, (first, engines) = launch.stream_index, self.places[launch.stream_index]
        launch.base, last, self.last[stream] = self.stream_clock[stream], self.last[stream], launch
        launch.actors, launch.lore, launch.first = [], new_lore(), first
        if launch.programmatic and last is not None:
            launch.before = launch.base
            if last.before is None:             # else that one may have begun early itself
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
        following = self.places[launch.stream_index + 1:launch.stream_index + 2]
        after = following[0][0] if following else self.engines_end
        clock[engines:after] = np.maximum(clock[engines:after], self.engine_time[engines:after])
        self.stream_clock[launch.stream_index] = clock

    # ------------------------------------------------------------------ joins
    def join(self, actors):
        """Clock of everything that any of them has done."""
        bases = list({id(a.base): a.base for a in actors}.values())
        clock = bases[0].copy() if len(bases) == 1 else np.maximum.reduce(bases)
        of = memoryview(clock)
        for a in actors:
            of[a.idx] = a.time
        return clock

    def barrier(self, actors):
        """All of these actors meet and see what any of them did."""
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
        """Acquire what earlier strong loads observed, then remember the clock for later strong stores."""
        rest = []
        for head in a.observed:
            if covers(head[1], head[0], a) and covers(scope, a, head[0]):
                a.learn(head[2], head[4])
            else:
                rest.append(head)
        a.observed = rest
        a.fences = {s: f for s, f in a.fences.items() if s > scope}
        a.fences[scope] = (a.snapshot(), a.proxy if self.fenced_proxy else None)
        a.time += 1

    # ------------------------------------------------------------------ strong operations
    def strong(self, a, address, n, read, write, scope, acquire, release, word, frame, span, before, after):
        """A strong load, store or RMW; before, after: values in memory. Returns the value that a load sees."""
        location = self.locations.get(address)
        if location is None:
            location = self.locations[address] = Location(n)
            self.strong_granules.setdefault(address >> 4, []).append(address)
        self.number += 1
        back = frame.f_back
        access = (a, a.time, scope, address, n, write, word, frame.f_code, frame.f_lasti,
                  back.f_code, back.f_lasti, self.number)
        last, heads, chain = location.last, location.heads, False
        if self.stale and not write and len(location.history) > 1 and last[4] == n:
            last, heads, before = self.older(a, location, n)
        if read and last is not None:
            chain = bool(morally_strong(last, access))
            # a spin reads the same value many times; one that acquires it may follow others that do not
            looked = 2 * location.version + bool(acquire)
            if write or self.stale or a.seen.get(address, -1) < looked:
                a.seen[address] = looked
                if chain:
                    self.observe(a, location, access, acquire, scope, last, heads)
                else:
                    self.reject(last, access, "the write is a plain store" if not last[2] else "they differ in size"
                                if last[4] != n else APART % (SCOPE_NAMES[last[2]], SCOPE_NAMES[scope]))
        self.check_strong(access, span)
        if write:
            if not read and before != after and last is not None and last[2] and last[6] in PURE_STORES:
                self.check_order(last, access, span)
            self.publish(a, location, access, scope, release, chain, before, after)
        return before

    def check_order(self, last, access, span):
        """Two strong stores of different values to a word: whatever else they are for, one of them must come last."""
        a, old = access[0], last[0]
        if old is not a and a.known[old.idx] < last[1] and not self.was_observed(last, a):
            self.race(last, access, span, "order")

    def publish(self, a, location, access, scope, release, chain, before, after):
        """A strong write: what those who read it can acquire."""
        me = a.idx
        keep = location.heads if chain else {k: h for k, h in location.heads.items() if k[0] == me}
        heads = dict(keep)
        for s, (clock, proxy) in a.fences.items():
            heads[me, s] = (a, s, clock, access, proxy)
        if release:
            heads[me, scope] = (a, scope, a.snapshot(), access, a.proxy if self.fenced_proxy else None)
        location.heads = heads
        if self.stale:
            if not location.history:
                location.history.append((location.last, keep, before))
            location.history.append((access, heads, after))
        elif not chain:
            location.observations = []
        location.last = access
        location.version += 1
        if release:
            a.time += 1

    def observe(self, a, location, access, acquire, scope, write, heads):
        """A strong read saw a strong write, each inside the other's scope."""
        location.observations.append((write[11], a.idx, access[1]))
        writer = write[0].idx
        if not any(k[0] == writer for k in heads):
            self.reject(write, access, "the write is relaxed")
        missed = []
        for head in heads.values():
            if head[0] is a:
                continue
            if acquire and covers(head[1], head[0], a) and covers(scope, a, head[0]):
                a.learn(head[2], head[4])
            else:
                missed.append(head)
        for head in missed:             # behind the others: a write may have a head of each scope
            a.observed.append(head)
            self.reject(head[3], access, "the read is relaxed" if not acquire else
                        APART % (SCOPE_NAMES[head[1]], SCOPE_NAMES[scope]))

    def reject(self, write, read, why):
        """Remember a pair that did not synchronise, for reports."""
        w, r = write[0], read[0]
        if w is not r and r.known[w.idx] < write[1]:
            self.rejected[write[7], write[8], read[7], read[8], w.block, r.block] = (write, read, why)

    def older(self, a, location, n):
        """Stale mode: a write that this load may see; none that it, or one known to have been seen, comes after.

        Nor one of another size than the load's n bytes, or what was there before it.
        """
        history = location.history
        known = {number for number, z, time in location.observations if z == a.idx or a.known[z] >= time}
        low = len(history) - 1
        while low:
            write = history[low][0]
            if write is None or write[11] in known or write[0].idx == a.idx or a.known[write[0].idx] >= write[1]:
                break
            if history[low - 1][0] is not None and history[low - 1][0][4] != n:
                break
            low -= 1
        return history[-1 if self.stale.random() < 0.5 else self.stale.randrange(low, len(history))]
