"""Hopper intrinsics: mbarriers, bulk copies between shared and global memory, programmatic launch.

No thread performs a bulk copy. It is queued, and the scheduler performs it in two steps (read all, write all) at some
later time, at the latest when a thread waits for it. So code that does not wait sees old bytes here too.
"""

import ctypes
import sys

from epmoe_ref.errors import EPError

from .ops import MASK64, intrinsic, span_of, step
from .scheduler import NOW
from .shared import shared_span
from .warp import meet


class Mbarrier:
    """An mbarrier. The phase ends after `pending` more arrivals and `tx` more bytes."""

    __slots__ = ("count", "pending", "tx", "phase", "address", "arrived", "completed")

    def __init__(self, count, address):
        self.count = self.pending = count
        self.tx = self.phase = 0
        self.address = address
        self.arrived = self.completed = None  # clocks, for the race detector

    def settle(self):
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            if self.address >> 4 in NOW.watchers:
                NOW.written(self.address >> 4)
            return True
        return False

    def lacks(self):
        """What must still happen for the phase to end, as text."""
        parts = []
        if self.pending:
            parts.append("%d of %d arrivals" % (self.pending, self.count))
        if self.tx > 0:
            parts.append("%d bytes that mbar_expect_tx announced" % self.tx)
        if self.tx < 0:
            parts.append("an mbar_expect_tx of %d bytes that were copied" % -self.tx)
        return " and ".join(parts)


class Copy:
    """A bulk copy in flight."""

    __slots__ = ("source", "target", "nbytes", "target_span", "mbarrier", "data", "done", "thread", "ticket")

    def __init__(self, thread, source, target, nbytes, target_span, mbarrier=None, ticket=None):
        self.thread, self.source, self.target, self.nbytes = thread, source, target, nbytes
        self.target_span, self.mbarrier, self.ticket = target_span, mbarrier, ticket
        self.data = None
        self.done = False

    def read(self):
        if self.data is None:
            self.data = ctypes.string_at(self.source, self.nbytes)

    def perform(self):
        """Do the next step: read, or write and signal."""
        if self.done:
            return
        if self.data is None:
            self.read()
            NOW.copies.append(self)
            return
        ctypes.memmove(self.target, self.data, self.nbytes)
        self.done = True
        NOW.copied(self.target, self.nbytes)
        if self.mbarrier is not None:
            if NOW.detector is not None:
                NOW.detector.copy_landed(self.mbarrier, self.ticket)
            self.mbarrier.tx -= self.nbytes
            if self.mbarrier.settle() and NOW.detector is not None:
                NOW.detector.phase_ends(self.mbarrier)

    def finish(self):
        while not self.done:
            self.perform()


def _fault(t, text):
    raise EPError("%s: %s" % (t.place(), text))


def _mbarrier(t, address, name):
    real, span = shared_span(t, address, 8, name)
    found = t.block.mbarriers.get(real)
    if found is None:
        _fault(
            t,
            "%s on shared address %d, where mbar_init has not made an mbarrier: let one thread run mbar_init, then "
            "syncthreads, before any use" % (name, address),
        )
    return found, span


@intrinsic
def mbar_init(mbar, count):
    """Make an mbarrier at a shared-window address (8 bytes, aligned) that takes `count` arrivals a phase.

    Before other threads use it, syncthreads. Before a bulk copy uses it, also fence_proxy_async, by the thread that made it.
    """
    t = step()
    real, span = shared_span(t, mbar, 8, "mbar_init")
    if NOW.detector is not None:
        NOW.detector.plain(t.actor, real, 8, True, "mbar_init", sys._getframe(1), span)
    t.block.mbarriers[real] = Mbarrier(int(count), real)


def _arrive(t, mbar, nbytes, name, frame):
    bar, span = _mbarrier(t, mbar, name)
    if bar.pending == 0:
        _fault(
            t,
            "%s: one arrival too many in phase %d of an mbarrier made for %d: wait for the end of the phase before "
            "the next arrival, or give mbar_init a larger count" % (name, bar.phase, bar.count),
        )
    if NOW.detector is not None:
        NOW.detector.arrives(t.actor, bar, name, frame, span)
    bar.tx += nbytes
    bar.pending -= 1
    if bar.settle() and NOW.detector is not None:
        NOW.detector.phase_ends(bar)


@intrinsic
def mbar_expect_tx(mbar, nbytes):
    """Arrive, and extend the phase until nbytes more have been copied."""
    t = step()
    _arrive(t, mbar, int(nbytes), "mbar_expect_tx", sys._getframe(1))


@intrinsic
def mbar_arrive(mbar):
    """Arrive (release, scope cta)."""
    t = step()
    _arrive(t, mbar, 0, "mbar_arrive", sys._getframe(1))


@intrinsic
def mbar_try_wait(mbar, parity):
    """1 if the phase of this parity has ended (acquire, scope cta), else 0, perhaps after a while.

    The first phase has parity 0, the next one 1. On a new mbarrier a wait for parity 1 returns 1 at once.
    """
    t = step()
    bar, span = _mbarrier(t, mbar, "mbar_try_wait")
    if NOW.detector is not None:
        NOW.detector.touch_mbarrier(t.actor, bar, "mbar_try_wait", sys._getframe(1), span)
    if bar.phase & 1 != parity & 1:
        if NOW.detector is not None:
            NOW.detector.sees_phase(t.actor, bar)
        return 1
    NOW.poll(t, bar.address, bar.phase, bar.phase)
    return 0


def _check_bulk(t, name, nbytes):
    if nbytes <= 0 or nbytes % 16:
        _fault(t, "%s of %d bytes: the size must be a positive multiple of 16" % (name, nbytes))


@intrinsic
def bulk_load(shared_dst, src, nbytes, mbar):
    """Copy nbytes (multiple of 16) from global memory to a shared-window address; the mbarrier counts the bytes."""
    t = step()
    src, nbytes = src & MASK64, int(nbytes)
    _check_bulk(t, "bulk_load", nbytes)
    bar, bar_span = _mbarrier(t, mbar, "bulk_load")
    span = span_of(src, nbytes, "bulk_load", 16)
    real, shared = shared_span(t, shared_dst, nbytes, "bulk_load", 16)
    ticket = None
    if NOW.detector is not None:
        ticket = NOW.detector.bulk_load(t.actor, real, src, nbytes, shared, span, sys._getframe(1), bar, bar_span)
    NOW.copies.append(Copy(t, src, real, nbytes, shared, bar, ticket))


@intrinsic
def bulk_store(dst, shared_src, nbytes):
    """Copy nbytes (multiple of 16) from a shared-window address to global memory, in the thread's open bulk group."""
    t = step()
    dst, nbytes = dst & MASK64, int(nbytes)
    _check_bulk(t, "bulk_store", nbytes)
    span = span_of(dst, nbytes, "bulk_store", 16, write=True)
    real, shared = shared_span(t, shared_src, nbytes, "bulk_store", 16)
    if NOW.detector is not None:
        NOW.detector.bulk_store(t.actor, real, dst, nbytes, shared, span, sys._getframe(1))
    copy = Copy(t, real, dst, nbytes, span)
    t.open_copies.append(copy)
    NOW.copies.append(copy)


@intrinsic
def bulk_commit():
    """Close the thread's current group of bulk stores."""
    t = step()
    t.copies.extend(t.open_copies)
    t.open_copies = []
    if NOW.detector is not None:
        NOW.detector.bulk_commit(t.actor)


@intrinsic
def bulk_wait():
    """Wait until all closed groups of this thread are done. Their writes may then be signalled."""
    t = step()
    for copy in t.copies:
        copy.finish()
    t.copies = []
    if NOW.detector is not None:
        NOW.detector.bulk_wait(t.actor, True)


@intrinsic
def bulk_wait_read():
    """Wait until all closed groups of this thread have read their source. Shared memory may then be overwritten."""
    t = step()
    for copy in t.copies:
        copy.read()
    if NOW.detector is not None:
        NOW.detector.bulk_wait(t.actor, False)


@intrinsic
def fence_proxy_async():
    """Make ordinary accesses before it visible to bulk copies issued after it (by any thread ordered after this one)."""
    t = step()
    if NOW.detector is not None:
        NOW.detector.fence_proxy(t.actor)


@intrinsic
def elect_one():
    """1 in one lane of the warp (here the lowest), 0 in the others; all lanes meet."""
    t, vals = meet("elect_one", True)
    return 1 if vals.index(True) == t.lane else 0


@intrinsic
def griddep_wait():
    """Programmatic launch: wait until the launch before this one has ended.

    Streams here never overlap launches, but the race detector assumes that they may.
    """
    t = step()
    if NOW.detector is not None:
        NOW.detector.launch_before_has_ended(t)


@intrinsic
def griddep_launch():
    """Programmatic launch: the next launch may begin. Streams here never overlap launches."""
    step()
