"""Bulk copies in the race detector. They are performed by engines that have their own clocks.

A copy sees ordinary accesses only after fence_proxy_async. Each thread has a second clock (`proxy`) of the accesses before
its fences, and every synchronisation passes it on. Waiting for a copy tells a thread that its engine has finished:
bulk_wait_read the reading, bulk_wait reading and writing, mbar_try_wait the loads that its phase counted. Engines
belong to a warp, so bulk stores by different lanes of one warp are not distinguished.
"""

import numpy as np

from . import race_report
from .accesses import ALL, CHECKED_FOR, HIDDEN, IDX_BIT, STRONG_READS, new_cell
from .actors import CTA, Actor

ENGINES_PER_WARP = 6  # reader and writer of bulk stores, and four for bulk loads in flight


class AsyncProxy:
    """The detector's side of the Hopper intrinsics."""

    def engines(self, a):
        """Indices in the clocks of the engines of an actor's warp."""
        if a.engines is None:
            launch = a.launch
            warps = (launch.threads + 31) // 32
            start = self.places[launch.stream_index][1]
            a.engines = start + (a.block.index * warps + (a.tid >> 5)) * ENGINES_PER_WARP
        return a.engines

    def engine(self, a, which, word):
        """An actor for one copy. It has its issuer's knowledge and the engine's next time."""
        idx = self.engines(a) + which
        self.engine_time[idx] += 1
        e = Actor(idx, a.base, a.block, a.tid, word)
        e.time = int(self.engine_time[idx])
        e.proxy = a.proxy
        return e

    def bulk(self, e, address, nbytes, write, word, frame, span):
        """An engine touches nbytes. Earlier ordinary writes must have passed a proxy fence; earlier ordinary reads must
        be ordered. The issuer's own earlier reads are.
        """
        if write and span not in self.written:
            self.first_write(span)
        known, fenced, me, issuer = e.known, memoryview(e.proxy), e.idx, self.issuer(e)
        back = frame.f_back
        access = (e, e.time, 0, address, nbytes, write, word, frame.f_code, frame.f_lasti, back.f_code, back.f_lasti, 0)
        key = me << IDX_BIT | ALL
        for granule in range(address >> 4, address + nbytes >> 4):
            cell = self.granules.get(granule)
            if cell is None:
                cell = self.granules[granule] = new_cell()
            by_sight = False
            for old in cell[0].values():
                i = old[0].idx
                if i != me and fenced[i] < old[1]:
                    if self.was_observed(old, fenced, me):
                        by_sight = True
                    else:
                        kind = "proxy" if known[i] >= old[1] or i == issuer else None
                        self.race(old, self.at(access, granule), span, kind)
            if by_sight and cell[HIDDEN]:
                self.check_hidden(self.at(access, granule), cell, span, fenced, me)
            if write:
                for old in (*reversed(cell[1]), *(cell[STRONG_READS] or {}).values()):
                    i = old[0].idx
                    if i != me and known[i] < old[1] and i != issuer:
                        self.race(old, self.at(access, granule), span)
                self.forget(cell, granule << 4, (granule << 4) + 16)
                cell[CHECKED_FOR] = 0
                cell[0][key] = access
                if granule in self.strong_granules:
                    self.weak_write(granule << 4, 16, access)
            else:
                cell[1].append(self.at(access, granule))
        if span.host_accesses:
            self.check_host(access, span)

    @staticmethod
    def at(access, granule):
        return access[:3] + (granule << 4, 16) + access[5:]

    def issuer(self, e):
        """Index in the clocks of the thread that issued the copy."""
        return e.launch.first + e.block.index * e.launch.threads + e.tid

    # ------------------------------------------------------------------ stores
    def bulk_store(self, a, source, target, nbytes, shared, span, frame):
        reader, writer = self.engine(a, 0, "bulk_store"), self.engine(a, 1, "bulk_store")
        a.issued = writer.time
        self.bulk(reader, source, nbytes, False, "bulk_store", frame, shared)
        self.bulk(writer, target, nbytes, True, "bulk_store", frame, span)

    def bulk_commit(self, a):
        a.committed = a.issued

    def bulk_wait(self, a, writes):
        if not a.committed:
            return
        first = self.engines(a)
        clock = a.base.copy()
        clock[first] = max(clock[first], a.committed)
        a.read_waited = a.committed
        if writes:
            clock[first + 1] = max(clock[first + 1], a.committed)
        a.learn(clock)
        proxy = a.proxy.copy()
        proxy[first : first + 2] = clock[first : first + 2]
        a.proxy = proxy
        self.fenced_proxy = True

    def thread_ends(self, a):
        if a.issued > a.read_waited:
            self.report(race_report.unfinished_store(a))

    def fence_proxy(self, a):
        a.proxy = a.snapshot()
        a.time += 1
        self.fenced_proxy = True

    # ------------------------------------------------------------------ loads and mbarriers
    def bulk_load(self, a, target, source, nbytes, shared, span, frame, mbarrier, mbarrier_span):
        launch_slots = a.launch.__dict__.setdefault("load_engines", {})
        key = (a.block.index, a.tid >> 5)
        slot = launch_slots[key] = (launch_slots.get(key, -1) + 1) % (ENGINES_PER_WARP - 2)
        e = self.engine(a, 2 + slot, "bulk_load")
        self.touch_mbarrier(e, mbarrier, "bulk_load", frame, mbarrier_span)
        self.bulk(e, source, nbytes, False, "bulk_load", frame, span)
        self.bulk(e, target, nbytes, True, "bulk_load", frame, shared)
        return e

    def touch_mbarrier(self, a, bar, word, frame, span):
        """An mbarrier is used. mbar_init must be ordered before it (for copies, by a fence to the async proxy too)."""
        cell = self.granules.get(bar.address >> 4)
        if cell is None:
            return
        known, back = memoryview(a.proxy) if a.word else a.known, frame.f_back
        access = (
            a,
            a.time,
            CTA,
            bar.address,
            8,
            False,
            word,
            frame.f_code,
            frame.f_lasti,
            back.f_code,
            back.f_lasti,
            0,
        )
        mask = 0xFF << (bar.address & 15)
        for k, old in cell[0].items():
            if k & mask:
                i = old[0].idx
                if i != a.idx and known[i] < old[1]:
                    only_proxy = a.word and (a.known[i] >= old[1] or i == self.issuer(a))
                    self.race(old, access, span, "proxy" if only_proxy else None)

    def arrives(self, a, bar, word, frame, span):
        """An arrival is a release at scope cta."""
        self.touch_mbarrier(a, bar, word, frame, span)
        clock, proxy = a.snapshot(), a.proxy
        if bar.arrived is not None:
            clock, proxy = np.maximum(clock, bar.arrived[0]), np.maximum(proxy, bar.arrived[1])
        bar.arrived = (clock, proxy)
        a.time += 1

    def copy_landed(self, bar, e):
        """A copy has written its bytes and signals the mbarrier."""
        clock = bar.arrived[0].copy() if bar.arrived is not None else np.zeros(self.n, np.int32)
        proxy = bar.arrived[1].copy() if bar.arrived is not None else np.zeros(self.n, np.int32)
        clock[e.idx] = max(clock[e.idx], e.time)
        proxy[e.idx] = max(proxy[e.idx], e.time)
        bar.arrived = (clock, proxy)

    def phase_ends(self, bar):
        bar.completed = bar.arrived
        bar.arrived = None

    def sees_phase(self, a, bar):
        """A successful wait acquires what the arrivals and copies of the phase released."""
        if bar.completed is not None:
            a.learn(*bar.completed)
            self.fenced_proxy = True
