"""A simulated network between p2p worlds: SHMEM puts and signals that arrive later, in any order that NVSHMEM allows.

A put or signal waits among the scheduler's copies. It is delivered at some later step of any thread, perhaps after its
launch has ended. The source of a put is read at delivery, so bytes overwritten before then arrive changed.

- Each lane of a put's warp moves a part, and the parts arrive separately.
- A thread's operations are unordered, except two to the same rank with a shmem_fence between them.
- shmem_quiet completes the calling thread's operations, with its part of its warp's puts, and no other thread's.
- A signal is a relaxed store at system scope in the target's memory. A shmem_fence before the signal also covers
  operations that other threads have completed and this thread has acquired, as over NVLink.

Sources and targets are in symmetric memory. A target is given as its address in the caller's memory, and a rank.
"""

import ctypes
import sys
from typing import NamedTuple

from epmoe_ref.errors import EPError, OutOfBoundsError

from .memory import ONE_AT_A_TIME, VIEW
from .ops import span_of, step
from .scheduler import NOW
from .warp import meet

VECTOR = 16  # bytes; parts of a put are whole vectors
LANES = 32
DELAYS = (0, 0, 2, 20)  # how often a delivery may be delayed
U64 = VIEW["u64"]


class Heap(NamedTuple):
    """Symmetric memory: one allocation of nbytes for each rank, all with one layout, at these addresses."""

    addresses: tuple
    nbytes: int


class Network:
    """The symmetric memories of one machine, and the deliveries that are in flight while no kernel runs.

    waits: deliveries may wait for the next launch. If False (other processes need them), they arrive when a run ends.
    """

    def __init__(self, waits):
        self.heaps, self._late, self._waits = [], [], waits

    def connect(self, addresses, nbytes):
        """Let kernels put into the allocations at these addresses, one a rank."""
        self.heaps.append(Heap(tuple(addresses), nbytes))

    def disconnect(self, addresses):
        """End one connect()."""
        self.settle()
        self.heaps = [h for h in self.heaps if h.addresses != tuple(addresses)]

    def settle(self):
        """Deliver everything."""
        with ONE_AT_A_TIME:
            for delivery in self.take_late():
                delivery.finish()

    def take_late(self):
        """The deliveries that were in flight at the end of the last run, for the next run."""
        late, self._late = self._late, []
        return late

    def outlive(self, copies):
        """At the end of a run, complete the copies of its launches. Deliveries may take longer."""
        for copy in list(copies):
            if self._waits and isinstance(copy, Delivery) and not copy.done:
                copy.ticket = None  # it belongs to the run's race detector; the host has waited for the launches since
                self._late.append(copy)
            else:
                copy.finish()

    def heap_of(self, t, address, nbytes, name, what):
        """The heap that holds these bytes of the thread's rank."""
        for heap in self.heaps:
            if heap.addresses[t.rank] <= address and address + nbytes <= heap.addresses[t.rank] + heap.nbytes:
                return heap
        raise OutOfBoundsError(
            "%s of %s: its %s (address %#x, %d bytes) is not in the symmetric memory of rank %d"
            % (name, t.place(), what, address, nbytes, t.rank)
        )

    def at(self, t, address, nbytes, pe, name):
        """The address of the same bytes in the memory of rank pe."""
        heap = self.heap_of(t, address, nbytes, name, "target")
        if not 0 <= pe < len(heap.addresses):
            raise EPError("%s of %s: there is no rank %d of %d" % (name, t.place(), pe, len(heap.addresses)))
        return heap.addresses[pe] + address - heap.addresses[t.rank]


class Delivery:
    """A part of a put, or a signal, in flight to rank `pe`."""

    __slots__ = ("pe", "after", "patience", "done", "ticket")

    def __init__(self, t, pe, ticket):
        self.pe, self.ticket, self.done = pe, ticket, False
        self.after = t.fenced.get(pe, ())
        self.patience = NOW.random.choice(DELAYS) if NOW.random else 0
        t.sent.append(self)
        NOW.copies.append(self)

    def perform(self):
        """Arrive, or wait a little longer."""
        if self.done:
            return
        if self.patience:
            self.patience -= 1
            NOW.copies.append(self)
            return
        self.finish()

    def finish(self):
        """Arrive, after all deliveries that a fence orders before this one."""
        if self.done:
            return
        for earlier in self.after:
            earlier.finish()
        self.after = ()
        self.done = True
        self.arrive()


class Put(Delivery):
    """Bytes to copy from `source` to `target`, real addresses."""

    __slots__ = ("source", "target", "nbytes")

    def __init__(self, t, pe, source, target, nbytes, ticket):
        self.source, self.target, self.nbytes = source, target, nbytes
        super().__init__(t, pe, ticket)

    def arrive(self):
        ctypes.memmove(self.target, self.source, self.nbytes)
        NOW.copied(self.target, self.nbytes)


class Signal(Delivery):
    """A value to store into the u64 word at `target`, a real address."""

    __slots__ = ("target", "value", "span", "place")

    def __init__(self, t, pe, target, value, span, place, ticket):
        self.target, self.value, self.span, self.place = target, value, span, place
        super().__init__(t, pe, ticket)

    def arrive(self):
        words, k = self.span.strong[U64], self.target - self.span.origin >> 3
        if self.ticket is not None:
            NOW.detector.signal_arrives(self.ticket, self.target, self.span, self.place, words[k], self.value)
        words[k] = self.value
        if self.target >> 4 in NOW.watchers:
            NOW.written(self.target >> 4)


class _Place:
    """A thread's place in the source, for reports, copied from its frame."""

    __slots__ = ("f_code", "f_lasti", "f_back")

    def __init__(self, frame, callers=1):
        self.f_code, self.f_lasti = frame.f_code, frame.f_lasti
        self.f_back = _Place(frame.f_back, callers - 1) if callers else None


# ---------------------------------------------------------------- words
def shmem_put_nbi_warp(dst, src, nbytes, pe):
    """Start copying nbytes from src to dst in the memory of rank pe. All lanes of the warp give the same arguments.

    Addresses and nbytes are multiples of 16. src and dst lie in symmetric memory.
    """
    name, given = "shmem_put_nbi_warp", (int(dst), int(src), int(nbytes), int(pe))
    t, vals = meet(name, given)
    dst, src, nbytes, pe = given
    if any(v is not None and v != given for v in vals[:LANES]):
        raise EPError("%s: the lanes of the warp give %s different arguments" % (t.place(), name))
    if nbytes <= 0 or (dst | src | nbytes) % VECTOR:
        raise EPError(
            "%s: %s of %d bytes from %#x to %#x: all must be multiples of 16" % (t.place(), name, nbytes, src, dst)
        )
    network = NOW.run.machine.network
    per_lane = -(-nbytes // (VECTOR * LANES)) * VECTOR
    first = t.lane * per_lane
    nbytes = min(per_lane, nbytes - first)
    if nbytes <= 0:
        return
    source, target = src + first, network.at(t, dst + first, nbytes, pe, name)
    network.heap_of(t, source, nbytes, name, "source")
    source_span = span_of(source, nbytes, name, VECTOR)
    span = span_of(target, nbytes, name, VECTOR, write=True)
    ticket = None
    if NOW.detector is not None:
        ticket = NOW.detector.put(t.actor, source, target, nbytes, source_span, span, sys._getframe(1))
    Put(t, pe, source, target, nbytes, ticket)


def shmem_signal_set(word, value, pe):
    """Set the u64 word in the memory of rank pe. `word` is its address here. It arrives some time later."""
    t, word, pe = step(), int(word), int(pe)
    target = NOW.run.machine.network.at(t, word, 8, pe, "shmem_signal_set")
    span = span_of(target, 8, "shmem_signal_set", write=True)
    place, ticket = _Place(sys._getframe(1)), None
    if NOW.detector is not None:
        before = t.fenced.get(pe, ()) if t.fenced.keys() <= {pe} else ()
        ticket = NOW.detector.signal(t.actor, max([d.ticket for d in before if isinstance(d, Put)], default=0))
    Signal(t, pe, target, int(value) & 2**64 - 1, span, place, ticket)


def shmem_fence():
    """Order: this thread's earlier puts and signals to a rank arrive before its later ones.

    Also a fence of system scope: a later signal covers everything that this thread has written or acquired.
    """
    t = step()
    t.sent = [d for d in t.sent if not d.done]
    t.fenced = {}
    for d in t.sent:
        t.fenced.setdefault(d.pe, []).append(d)
    if NOW.detector is not None:
        NOW.detector.fence(t.actor, 3)


def shmem_quiet():
    """Wait for this thread's puts and signals, with its part of its warp's puts. Sources may then be reused."""
    t = step()
    for d in t.sent:
        d.finish()
    t.sent, t.fenced = [], {}
    if NOW.detector is not None:
        NOW.detector.quiet(t.actor)
