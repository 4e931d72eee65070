"""The memory behind the rows functions of one group. It grows on all ranks in the same call.

The memory that a call needs follows from its arguments. So ranks compare arguments that are new, and again when a wait
has expired.
"""

from collections import deque
from operator import methodcaller
from typing import NamedTuple

import numpy as np

from epmoe.device.telling import HostWords
from epmoe.host.memory_pool import MemoryPool, align
from epmoe.host.plans import Plans
from epmoe.kernels.rows import mailbox
from epmoe.kernels.rows.copy import flag_bytes_for
from epmoe.kernels.rows.shape import NO_LIMIT
from epmoe.kernels.rows.small import lamport
from epmoe.worlds.agreement import differences
from epmoe.worlds.symmetric import SymmetricMemory
from epmoe_ref.errors import EPStateError, PeerTimeout

RESULTS_AT_ONCE = 2  # as many of the largest results have room in the heap
INITIAL_LOCAL_EXPERTS = 64
MOST_CALLS = 32
PATIENCE_S = 2.0  # ranks that wait for each other give up at about the same time
SAME = "do all ranks make the same calls, with the same sizes?"


def _grown(has, needs):
    """Bytes for a part of the pool. It grows by at least half, so that it seldom grows."""
    return has if needs <= has else align(max(needs, has + has // 2))


class PoolLayout(NamedTuple):
    """Bytes of each part of the pool, in memory order. Lamport rows have two copies, one for each parity of calls."""

    flag_bytes: int = 0  # flags of rows
    lamport_bytes: int = 0  # Lamport rows, of one parity
    staging_bytes: int = 0  # receives rows for which the heap has no room
    heap_bytes: int = 0  # results are lent from here

    def grown(self, staging_bytes=0, result_bytes=0, flag_rows=0, lamport_bytes=0):
        """A layout that also has room for this; the same layout if there is room already.

        result_bytes: of one result; flag_rows: rows that have flags.
        """
        is_larger = result_bytes > min(self.heap_bytes, self.staging_bytes)
        heap = align(result_bytes) * RESULTS_AT_ONCE if is_larger else 0
        return PoolLayout(
            _grown(self.flag_bytes, align(flag_bytes_for(flag_rows))),
            _grown(self.lamport_bytes, lamport_bytes),
            _grown(self.staging_bytes, align(max(staging_bytes, result_bytes))),
            _grown(self.heap_bytes, heap),
        )

    lamport_at = property(lambda self: self.flag_bytes, doc="Where Lamport rows lie.")
    staging_at = property(lambda self: self.lamport_at + 2 * self.lamport_bytes, doc="Where the staging area lies.")
    heap_at = property(lambda self: self.staging_at + self.staging_bytes, doc="Where the heap lies.")
    nbytes = property(lambda self: self.heap_at + self.heap_bytes, doc="Bytes of the pool.")

    def regions(self):
        """The parts of the pool, for the simulator's reports."""
        flags = self.flag_bytes // flag_bytes_for(1), mailbox.MOST_PARTS
        words = 2, self.lamport_bytes // 4
        return [
            ("row flags", 0, flags, np.uint32, ("row", "part")),
            ("Lamport rows", self.lamport_at, words, np.uint32, ("parity", "word")),
            ("rows staging", self.staging_at, (self.staging_bytes,), np.uint8, ("byte",)),
            ("rows results", self.heap_at, (self.heap_bytes,), np.uint8, ("byte",)),
        ]

    def clear(self, buffer):
        """Reset a rank's pool: flags name no call, and no Lamport row has arrived."""
        buffer.fill(0, 0, self.lamport_at)
        buffer.fill(0xFF, self.lamport_at, 2 * self.lamport_bytes)


_zero = methodcaller("fill", 0)  # a buffer


def _control_regions(at, n_ranks):
    boxes, words = (2, n_ranks, at.mailbox_bytes // 8), ("parity", "src_rank", "word")
    return [
        ("arrived", at.arrived, (2, n_ranks), np.int32, words[:2]),
        ("mailboxes", at.mailboxes, boxes, np.uint64, words),
    ]


class CallLog:
    """Compares the ranks' calls. number: of the last call that launched, the same on all ranks.

    recent: (number, facts) of this rank's latest calls. facts: {name: value} that must be equal on all ranks; "call" is
    the call's name.
    """

    def __init__(self, world):
        self._world, self._agreed = world, set()
        self.number, self.recent = 0, deque(maxlen=MOST_CALLS)

    def agree(self, facts, timeout):
        """Compare new facts with the other ranks'. If any differs, all ranks raise an EPValueError that names it."""
        self.recent.append((self.number + 1, facts))
        key = tuple(facts.items())
        if key in self._agreed:
            return
        try:
            self._world.same(f"what the ranks gave to {facts['call']}", facts, timeout)
        except PeerTimeout as late:
            raise PeerTimeout(f"{late}. This rank calls {_as_called(facts)}: {SAME}") from None
        self._agreed.add(key)

    def compared(self, timeout):
        """A sentence on how the ranks' calls differ, or ""; waits a little for the other ranks."""
        world = self._world
        if world.lists:
            return ""
        of_ranks = world.hear(dict(self.recent), min(timeout, PATIENCE_S))
        for number in sorted(set.intersection(*map(set, of_ranks.values()))):
            given = {rank: known[number] for rank, known in of_ranks.items()}
            if differing := differences(given):
                calls = {facts["call"] for facts in given.values()}
                what = "made different calls"
                if len(calls) == 1:
                    what = f"gave {calls.pop()} different sizes"
                return f". The ranks {what}: {differing}. Make the same calls on every rank, with the same sizes"
        if len(of_ranks) == world.n_ranks:
            return ""
        return f". This rank called {_as_called(self.recent[-1][1])}: {SAME}"


def _as_called(facts):
    """A call and its arguments, in words."""
    given = ", ".join(f"{name}={value!r}" for name, value in facts.items() if name != "call")
    return f"{facts['call']} with {given}" if given else facts["call"]


class _Rank:
    """One rank of this process: its own words and scratch, and its arena."""

    def __init__(self, machine, rank):
        self.rank, self.arena = rank, MemoryPool(machine, rank)
        self.words = machine.alloc(mailbox.WORDS_BYTES, "rows words", rank)
        self.words.fill(0)
        self.scratch = None  # columns of the layout


class GroupMemory:
    """A group's memory: control (a few kB that peers write), the pool (peers write rows into it), and each rank's own.

    The pool holds flags of rows, windows for Lamport rows, a staging area and a heap of results for each rank. It grows
    and never shrinks; results and handles in use stay valid. Memory that has been outgrown is freed in the first call
    after the last result in it was dropped; it stays if a CUDA graph may use it (captured, of the Buffer). If the heap
    has no room for a result, it is received in the staging area and moved to memory of its own, so the numbers never
    depend on which results the caller keeps.
    closed, captured, capture(), of the Buffer: the last is the id of the CUDA graph capture that the stream is in, or 0.
    """

    def __init__(self, group, launches, timeout):
        self.world, self.machine, self.launches = group, group.machine, launches
        self.n_ranks, self.log, self._timeout = group.n_ranks, CallLog(group), timeout
        self.ranks = [_Rank(self.machine, rank) for rank in group.ranks]
        self.n_local_experts, self.max_tokens = 0, 0
        self.unused = []  # outgrown buffers without results: see release()
        self._retired = []  # outgrown memory
        self._no_memory = self.control = self.pool = SymmetricMemory({}, [0] * group.n_ranks)
        self.pool_layout, self.heaps = PoolLayout(), {}  # heaps: {rank: MemoryPool} for results in the pool
        self.host_words = HostWords(self.machine, group.ranks, group.stream_of(group.ranks[0]))
        self._plans = Plans()  # they hold addresses: see Buffer.call
        call = "get_buffer, in the group's first call"
        self.log.agree(dict(call=call), timeout)
        self.make_room(call, INITIAL_LOCAL_EXPERTS)

    def changed(self):
        """Drop all plans: memory or a setting that they depend on has changed, or a call has failed."""
        self._plans.clear()

    def make_room(self, call, n_local_experts=0, shape=None, **needs):
        """Make room in control memory and in the pool; collective if they must grow, as on all ranks in the same call.

        call: its name. n_local_experts: of a rank. shape: RowsShape of a kernel that may send Lamport rows. needs: other
        arguments of PoolLayout.grown().
        """
        if shape is not None:
            needs["lamport_bytes"] = lamport.bytes_for(shape)
        layout, n_local_experts = self.pool_layout.grown(**needs), max(n_local_experts, self.n_local_experts)
        if layout == self.pool_layout and n_local_experts == self.n_local_experts:
            return
        self._expect_no_capture()
        has_graphs = any(self.world.tell(bool(self.captured), self._timeout))
        if has_graphs and n_local_experts > self.n_local_experts > 0:
            raise EPStateError(
                f"{call} has {n_local_experts} experts a rank, more than {self.n_local_experts}, and CUDA graphs use "
                "this buffer: make a call with the most experts before the first capture"
            )
        self.machine.synchronize()
        self.changed()
        if n_local_experts > self.n_local_experts:
            self._replace_control(n_local_experts)
        if layout != self.pool_layout:
            self._replace_pool(layout)
        self.world.barrier("start", self._timeout)
        if not has_graphs:
            self._free_outgrown()

    def _replace_control(self, n_local_experts):
        n_ranks, tuning = self.n_ranks, self.launches.tuning
        words = -(-tuning.most_small(n_ranks, NO_LIMIT) // tuning.bits_word)
        layout = mailbox.control(n_ranks, n_local_experts, words)
        regions = _control_regions(layout, n_ranks)
        new = self.world.allocate(layout.nbytes, "rows control", regions, self._timeout)
        n_columns = n_ranks * (1 + n_local_experts)
        for r in self.ranks:
            # columns [blocks, n_columns] uint64
            nbytes = 8 * n_columns * self.launches.most_blocks
            outgrown, r.scratch = r.scratch, self.machine.alloc(nbytes, "rows layout", r.rank)
            if outgrown is not None:
                outgrown.free()
            for buffer in (r.scratch, new.buffers[r.rank]):
                buffer.fill(0)
        outgrown = [*self._retired, (self.control, {}, _zero)]
        # one statement, which no signal interrupts
        self._retired, self.control, self.n_local_experts, self.layout = outgrown, new, n_local_experts, layout

    def _replace_pool(self, layout):
        new, heaps = self.world.allocate(layout.nbytes, "rows pool", layout.regions(), self._timeout), {}
        for r in self.ranks:
            buffer = new.buffers[r.rank]
            layout.clear(buffer)
            heaps[r.rank] = MemoryPool(self.machine, r.rank, (buffer, layout.heap_at, layout.nbytes))
        outgrown = [*self._retired, (self.pool, self.heaps, self.pool_layout.clear)]
        self._retired, self.pool, self.heaps, self.pool_layout = outgrown, new, heaps, layout

    def initialise(self):
        """Reset words and flags to their state before the first call, also those of captured graphs; collective."""
        self.world.barrier("reset", self._timeout)
        for r in self.ranks:
            for memory in (r.words, r.scratch):
                memory.fill(0)
        for memory, _, clear in self._memories():
            for buffer in memory.buffers.values():
                clear(buffer)
        self.world.barrier("reset", self._timeout)

    def _memories(self):
        """(memory, {rank: MemoryPool}, function that clears a rank's part) of each, also of those that graphs keep."""
        return [*self._retired, (self.control, {}, _zero), (self.pool, self.heaps, self.pool_layout.clear)]

    def want_tokens(self, max_tokens):
        """Remember the most tokens of any rank. All ranks must pass the same number."""
        if max_tokens > self.max_tokens:
            self.max_tokens = max_tokens
            self.changed()

    def agree_on_tokens(self, num_tokens, is_told):
        """Remember the most tokens of any rank. is_told: the call tells the host the ranks' numbers of tokens.

        Collective for the first dispatch, and for one with more tokens than any before that does not tell the host; it
        must then have more on every rank. One that tells the host changes nothing here, but in told().
        """
        if self.max_tokens == 0 or (num_tokens > self.max_tokens and not is_told):
            self._expect_no_capture()
            try:
                of_ranks = self.world.tell(num_tokens, self._timeout)
            except PeerTimeout as late:
                raise PeerTimeout(
                    f"{late}. This rank has {num_tokens} tokens, more than any rank before ({self.max_tokens}): in a call "
                    "in which the host does not wait, all ranks must then have more. Make such a call with the most "
                    "tokens first, or one in which the host waits"
                ) from None
            self.want_tokens(max(1, *of_ranks))

    def _expect_no_capture(self):
        """Raise EPStateError while a CUDA graph is captured; called before memory grows."""
        if self.capture():
            raise EPStateError(
                "a call that needs more memory than any before is being captured into a CUDA graph, where memory cannot "
                "grow: run the step once before"
            )

    def _free_outgrown(self):
        """Free outgrown memory, which no graph of any rank may use, or let release() do it; collective.

        All ranks' kernels have ended, as allocate() is collective. Memory in NVSHMEM's heap is freed with the Buffer.
        """
        outgrown, self._retired = self._retired, []
        for memory, heaps, clear in outgrown:
            if isinstance(memory, SymmetricMemory):
                memory.free(True, self._timeout, heaps, self.release)
            else:
                self._retired.append((memory, heaps, clear))

    def release(self, buffer):
        """Free an outgrown buffer, whose last result was dropped: in the next call, as a graph may just be captured."""
        self.unused.append(buffer)
        if self.closed:
            self.free_unused()

    def free_unused(self):
        """Free what release() has left."""
        while self.unused:
            self.unused.pop().free()

    def put_back(self):
        """After an error: reset memory to its state before the first call; results stay valid. Collective."""
        self.machine.synchronize()
        self.world.barrier("reset", 2 * self._timeout)  # slower ranks first wait out their timeout
        self.log = CallLog(self.world)
        self.changed()
        mine = self.max_tokens, [self.n_local_experts, *self.pool_layout], bool(self.captured)
        max_tokens, sizes, has_graphs = zip(*self.world.tell(mine, self._timeout))
        self.max_tokens = max(max_tokens)
        if any(one != sizes[0] for one in sizes):
            if any(has_graphs):
                raise EPStateError(
                    "reset: the failed call made memory grow on some ranks only, and CUDA graphs use this buffer's: close "
                    "the buffer on all ranks, and capture graphs again"
                )
            # all start with new memory
            uneven, none = self._memories(), self._no_memory
            self.n_local_experts, self.pool_layout = 0, PoolLayout()
            self._retired, self.control, self.pool, self.heaps = [], none, none, {}
            for memory, heaps, _ in uneven:
                memory.free(False, self._timeout, heaps, self.release)
            self.make_room("reset", INITIAL_LOCAL_EXPERTS)
        self.initialise()

    def free(self, together):
        """Free everything; memory of results in use is freed when they are dropped."""
        self.host_words.free()
        for r in self.ranks:
            for memory in (r.words, r.scratch):
                memory.free()
            r.arena.close()
        for memory, heaps, _ in self._memories():
            memory.free(together, self._timeout, heaps)
        self._retired = []
        self.free_unused()

    def staging(self, r):
        """Address of a rank's staging area."""
        return self.pool.addresses[r.rank] + self.pool_layout.staging_at

    @property
    def allocated_bytes(self):
        """Bytes of one rank: control, pool, those that graphs keep, and memory of its own."""
        r = self.ranks[0]
        kept = [m.buffers[r.rank] for m, *_ in self._retired if r.rank in m.buffers]
        own = sum(memory.nbytes for memory in (r.words, r.scratch, *kept))
        return self.layout.nbytes + self.pool_layout.nbytes + own + sum(r.arena.bytes_by_name.values())
