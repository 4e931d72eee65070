"""Launches, blocks, warps and threads."""

import contextvars
import sys

import greenlet

from .memory import POISON, Span, aligned_bytes
from .scheduler import NOW

DEVICE_FOLDER = __file__.rpartition("sim")[0]
# shared-window address of dynamic shared memory: aligned no better than on a GPU
SHARED_WINDOW = 1024 + 16


def kernel_frame(frame):
    """The innermost frame outside the device layer: a line of a kernel."""
    while frame is not None and frame.f_code.co_filename.startswith(DEVICE_FOLDER):
        frame = frame.f_back
    return frame


def call_chain(frame, limit=4):
    """["dispatch.py:88", ...]: the kernel's line and its callers inside kernels, innermost first."""
    out = []
    frame = kernel_frame(frame)
    while frame is not None and not frame.f_code.co_filename.startswith(DEVICE_FOLDER) and len(out) < limit:
        out.append("%s:%d" % (frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno))
        frame = frame.f_back
    return out


class Launch:
    """One kernel launch: grid blocks of `threads` threads on a stream of a rank.

    programmatic: it may begin before the previous launch has ended. griddep_wait makes its threads wait for that one.
    """

    def __init__(self, number, kernel, grid, threads, args, stream, shared_bytes, programmatic=False):
        self.number, self.kernel = number, kernel
        self.grid, self.threads, self.args = grid, threads, args
        self.stream, self.rank, self.shared_bytes = stream, stream.rank, shared_bytes
        self.programmatic = programmatic
        self.to_start = list(range(grid))
        self.unfinished = grid
        self.actors = []  # of all its threads (race detector)
        self.base = None  # vector clock of the launch (race detector)
        self.before = None  # vector clock of the end of the launch before it, if it is programmatic
        self.first = 0  # index of its first thread in vector clocks
        self.ordinal = 0  # its number among its stream's launches in this run (race detector)

    def __str__(self):
        return "%s #%d" % (self.kernel.name, self.number)


class Block:
    """A running block: its barrier, its shared memory, its warps."""

    __slots__ = (
        "launch index rank speed live arrived calls votes shared spans shared_top warps threads mbarriers actors ready active"
    ).split()

    def __init__(self, launch, index, speed):
        self.launch, self.index, self.speed, self.rank = launch, index, speed, launch.rank
        self.live = launch.threads
        self.arrived = []  # threads parked at the barrier
        self.calls = []  # the instruction at which each of them called it
        self.votes = []
        self.shared = {}  # call site -> SharedArray
        self.spans = []  # (first window address, span) of every piece of shared memory
        self.mbarriers = {}  # real address -> Mbarrier
        self.shared_top = SHARED_WINDOW + launch.shared_bytes
        if launch.shared_bytes:
            self.new_span(launch.shared_bytes, "dynamic shared memory", SHARED_WINDOW)
        n_warps = (launch.threads + 31) // 32
        self.threads = []
        self.actors = [None] * launch.threads  # of its threads, with the race detector
        self.ready, self.active = NOW.new_ready_list(), False
        self.warps = [Warp(self, w, min(32, launch.threads - 32 * w)) for w in range(n_warps)]

    def new_span(self, nbytes, name, window, regions=None):
        data = aligned_bytes(max(nbytes, 16), 128)
        data[:] = POISON
        name = "%s of block %d" % (name, self.index)
        span = Span(data.ctypes.data, nbytes, name, self.rank, keep=data, regions=regions)
        self.spans.append((window, span))
        return span

    def locate(self, window_address, nbytes):
        """(real address, span) of bytes at a shared-window address, or None if no piece holds them."""
        for first, span in self.spans:
            if first <= window_address and window_address + nbytes <= first + span.high - span.low:
                return span.low + window_address - first, span
        return None


class Warp:
    """32 lanes that meet in warp operations. `vals` collects the operands of the operation that lanes are joining."""

    __slots__ = ("block", "index", "live", "kind", "vals", "count", "waiting")

    def __init__(self, block, index, live):
        self.block, self.index, self.live = block, index, live
        self.kind = self.vals = None
        self.count = 0
        self.waiting = []


class SimThread(greenlet.greenlet):
    """A CUDA thread. Later launches reuse the greenlet (starting one costs ten switches)."""

    __slots__ = (
        "block launch rank tid lane warp operations polled poll_time parked_on actor open_copies copies sent fenced"
    ).split()

    def __init__(self, hub):
        super().__init__(self._main, hub)
        self.gr_context = contextvars.copy_context()  # holds NumPy's error state

    def assign(self, block, tid):
        self.block, self.launch, self.rank, self.tid = block, block.launch, block.rank, tid
        self.lane = tid & 31
        self.warp = block.warps[tid >> 5]
        self.operations = 0  # operations of this thread up to its last switch
        # words seen by strong loads since its last other operation, their lowest bit set if acquired -> value
        self.polled = {}
        self.poll_time = -2
        self.parked_on = frozenset()  # the words that it waited for when it was last parked
        self.actor = None
        self.open_copies, self.copies = [], []  # its bulk stores: before and after bulk_commit
        # its operations on the network: all of them, and by target rank those that a fence orders
        self.sent, self.fenced = [], {}

    def _main(self):
        self.parent.switch()  # the hub begins all greenlets, so they have its stack depth, not their maker's
        while True:
            NOW.mark = NOW.fuel
            launch = self.launch
            launch.kernel.fn(*launch.args)
            self.operations += NOW.mark - NOW.fuel
            NOW.live -= 1
            NOW.quiet_since = NOW.stirred = NOW.steps
            NOW.looks = 0
            NOW.run.ended(self)
            self.block = self.launch = self.warp = self.actor = None
            NOW.pool.append(self)
            if NOW.live == 0:
                NOW.hub.switch()
            else:
                NOW.pick().switch()

    def where(self):
        """["dispatch.py:88", ...]: where this thread is."""
        frame = sys._getframe() if greenlet.getcurrent() is self else self.gr_frame
        return call_chain(frame)

    def name(self):
        return "rank %d block %d warp %d lane %d of %s" % (
            self.rank,
            self.block.index,
            self.tid >> 5,
            self.lane,
            self.launch,
        )

    def place(self):
        """The thread and its place: "rank 0 block 1 warp 0 lane 3 of dispatch #2 at copy.py:12 < dispatch.py:88"."""
        return "%s at %s" % (self.name(), " < ".join(self.where()))


def fill_pool(n):
    """Have n idle greenlets ready. Must be called by the hub."""
    hub, pool = NOW.hub, NOW.pool
    for t in pool:
        t.parent = hub
    while len(pool) < n:
        t = SimThread(hub)
        t.switch()
        pool.append(t)


def end_pool():
    """End the idle greenlets. Must be called by the hub."""
    pool = NOW.pool
    while pool:
        t = pool.pop()
        if not t.dead:
            t.throw(greenlet.GreenletExit)


def start_threads(block):
    """Make the threads of a block ready."""
    pool = NOW.pool
    for tid in range(block.launch.threads):
        t = pool.pop()
        t.assign(block, tid)
        block.threads.append(t)
    NOW.wake(block, block.threads)
    NOW.live += block.launch.threads
