"""Buffer: the memory behind the rows functions of one group, and what keeps its calls apart."""

import struct
from collections import deque
from threading import get_ident
from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.device.telling import HostWords
from epmoe.fused_a2a.arguments import PLAIN, without_rows
from epmoe.fused_a2a.calls import MOST_CALLS, as_called, compared
from epmoe.fused_a2a.launches import Launches, at, fill
from epmoe.fused_a2a.pool import PoolLayout
from epmoe.host import inputs
from epmoe.host.lending import Arena, Heap
from epmoe.host.placing import Placing
from epmoe.host.rounds import REFUSALS, Turn, in_short
from epmoe.kernels.rows import handle as written
from epmoe.kernels.rows import mailbox
from epmoe.kernels.rows import wait as rows_wait
from epmoe.kernels.rows.shape import parameter_block
from epmoe_ref.errors import EPError, EPStateError, EPValueError, PeerTimeout

INITIAL_LOCAL_EXPERTS = 64
MOST_PLANS = 1024
STATUS_BYTES = 64
ALL_WELL = bytes(STATUS_BYTES)
TOLD, TOLD_NUMBER = at("told"), at("told_number")


def _regions(at, n_ranks):
    return [
        ("arrived", at.arrived, (2, n_ranks), np.int32, ("parity", "src_rank")),
        (
            "notes",
            at.notes,
            (2, n_ranks, at.note_bytes // 8),
            np.uint64,
            ("parity", "src_rank", "word"),
        ),
    ]


class _Rank:
    """One rank of this process: its own words and scratch, its arena, and its heap in the pool."""

    def __init__(self, machine, rank):
        self.rank, self.arena = rank, Arena(machine, rank)
        self.words = machine.alloc(mailbox.WORDS_BYTES, "rows words", rank)
        self.scratch, self.retired = None, []  # columns of the layout, also of fewer experts
        self.heap = Heap(machine, None, 0, 0)


class Told(NamedTuple):
    """What a dispatch told the host of one rank; tokens_per_expert: int64 [L], the rest is numbers.

    tokens: of each rank. counts: rows from each rank [to each rank].
    """

    has_room: bool
    padded_rows: int
    tokens: list
    counts: list
    tokens_per_expert: np.ndarray


class Buffer:
    """Memory and launches for the fused_a2a functions of one group.

    group: a world (LocalWorld, MPIWorld). hidden_bytes: of a row, as get_hidden_bytes tells; the rest is known when
    rows come. timeout [s]: after it a wait gives up and PeerTimeout is raised. launch: LaunchConfig.

    Three kinds of memory: control, a few kB that peers write; the pool, which they write rows into: flags of rows,
    bits by expert, windows for few rows and for Lamport rows, a staging area and behind it a heap of results; and
    each rank's own memory. The pool grows, on all ranks in the same call, and never shrinks; results and handles that
    are in use survive that. A result that finds no room in the heap is received in the staging area and moved to memory
    of its own, so the numbers never depend on who holds on to what.
    """

    def __init__(self, group, hidden_bytes=0, *, timeout=30.0, launch=None):
        self.world, self.machine = group, group.machine
        self.hidden_bytes, self._timeout = hidden_bytes, inputs.seconds("timeout", timeout)
        self.launches = Launches(group, launch)
        self.placing = Placing(self.machine, lambda rank: self.world.stream_of(rank))
        self.n_ranks = group.n_ranks
        self.ranks = [_Rank(self.machine, rank) for rank in group.ranks]
        self.n_local_experts, self.max_tokens = 0, 0
        # With all ranks in one process every rank's number of tokens is known before the launch.
        self.knows_all_ranks = self.world_has_lists = bool(group.lists)
        self.is_alone = not (group.lists or device.SIM)  # launches begin one by one
        self.pool_layout = PoolLayout()
        self.failure, self.failed_call, self.closed = None, "a kernel", False
        self.is_captured = False  # whether the call under way is, into a CUDA graph
        self.captured = []  # Loans that graphs write to at every replay
        self._plans, self._streams = {}, None
        self.fp8_dispatch = False  # HybridEPDispatch: send blockwise FP8
        stream = group.stream_of(group.ranks[0])
        self.host_words = HostWords(self.machine, group.ranks, stream)
        self._info = struct.Struct(f"={written.TOKENS + self.n_ranks + self.n_ranks**2}i")
        self.turn = Turn()
        # the call under way, numbered alike on all ranks; what the latest were given, as for want_pool()
        self.number, self.recent = 0, deque(maxlen=MOST_CALLS)
        self._control = self._pool = None
        self._retired, self._agreed = [], set()
        self.capture = group.stream_of(group.ranks[0]).capture
        self.want_experts(INITIAL_LOCAL_EXPERTS, dict(call="get_buffer"))

    @property
    def timeout(self):
        """Seconds after which a wait gives up."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds):
        self._timeout = inputs.seconds("timeout", seconds)
        self.changed()

    def call(self, name, kind, names=(), arrays=(), options=(), of=None, interface=PLAIN):
        """run(kind, ...) as one call: whatever ends it but a refusal, also Ctrl-C, leaves it half-way."""
        turn = self.turn
        try:
            turn.free.pop()
        except IndexError:
            turn.refuse(name)
        turn.thread = get_ident()
        try:
            self.number += 1
            self.is_captured = self.capture() != 0
            if not device.SIM:
                return self.run(kind, names, arrays, options, of, interface)
            try:
                return self.run(kind, names, arrays, options, of, interface)
            finally:  # the simulator lets go of the caller's arrays
                self.machine.synchronize()
                self.placing.let_go()
        except REFUSALS:
            self.number -= 1
            raise
        except BaseException as error:
            if self.failure is None:
                self.failed_call, self.failure = name, error
            raise
        finally:
            turn.free[:] = (True,)

    def run(self, kind, names, arrays, options, of, interface=PLAIN):
        """A call by the plan for arrays like these, which is made if there is none: what its start() gives.

        kind: the class of the plan, made by kind(buffer, names, arrays, options, of), or a function that is called
        instead. options: what else decides about it. of: the call's handle, or the group of a dispatch.
        """
        if not arrays:
            return kind()
        look, other = interface.peeks.get, interface.peek
        if not self.world_has_lists:
            given = ([look(type(a), other)(a, name) for a, name in zip(arrays, names)],)
        else:
            given = self._look_at_lists(names, arrays, look, other)
        if self.closed or self.failure is not None:
            self.expect_open()
        forms = tuple([form for seen in given for form, _, _ in seen])
        if kind.of_handle:
            if kind.rows_vary and of.is_exact:
                forms = without_rows(forms, of.num_rows)
            forms = forms, of.form
        key = kind, options, forms
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            # of what was looked at: a look may have copied an array that kernels cannot read where it lies
            of_ranks = [[array for _, _, array in seen] for seen in zip(*given)]
            if not self.world_has_lists:
                of_ranks = [array for (array,) in of_ranks]
            plan = kind(self, names, of_ranks, options, of)
            self._plans[key] = plan  # the plan's own growing of memory has cleared them
        self.recent.append((self.number, plan.facts))
        return plan.start(given, of, interface)

    def _look_at_lists(self, names, arrays, look, other):
        of_all = inputs.each_rank(self.world, **dict(zip(names, arrays)))
        return [
            [look(type(a), other)(a, f"{name} of rank {r.rank}") for a, name in zip(of_rank, names)]
            for r, of_rank in zip(self.ranks, of_all)
        ]

    def changed(self):
        """What plans depend on is not what it was."""
        self._plans.clear()

    def lend(self, lender, arrangement):
        """A Loan of a Heap or an Arena, or None; what graphs write to is lent until close()."""
        loan = lender.lend(arrangement)
        if self.is_captured and loan is not None:
            self.captured.append(loan)
        return loan

    # ------------------------------------------------------------------ memory
    def want_experts(self, n_local_experts, facts):
        """Control memory for so many experts a rank; collective if it must grow. facts: as for want_pool()."""
        self._agree(facts)
        if n_local_experts <= self.n_local_experts:
            return
        self.machine.synchronize()
        self.changed()
        n_ranks, before = self.world.n_ranks, self._control
        layout = mailbox.control(n_ranks, n_local_experts, self.launches.tuning.words_of_bits)
        new = self.world.allocate(
            layout.nbytes, "rows control", _regions(layout, n_ranks), self.timeout
        )
        self._control, self.n_local_experts, self.layout = new, n_local_experts, layout
        if before is not None:
            self._retired.append((before, {}))
        n_columns, blocks = n_ranks * (1 + n_local_experts), self.launches.most_blocks
        for r in self.ranks:
            if r.scratch is not None:
                r.retired.append(r.scratch)  # captured graphs write there
            # columns [blocks, n_columns] uint64
            r.scratch = self.machine.alloc(8 * n_columns * blocks, "rows layout", r.rank)
        self.initialise()

    def initialise(self):
        """Words and flags as before the first call; collective."""
        self.world.barrier("reset", self.timeout)
        for r in self.ranks:
            r.words.fill(0)
            r.scratch.fill(0)
            self._control.buffers[r.rank].fill(0)
            if self._pool is not None:
                self.pool_layout.clear(self._pool.buffers[r.rank])
        self.world.barrier("reset", self.timeout)

    def want_tokens(self, max_tokens):
        """Remember the most tokens of any rank; all ranks are told the same."""
        if max_tokens > self.max_tokens:
            self.max_tokens = max_tokens
            self.changed()

    def want_pool(self, facts, **needs):
        """A pool with room for what is needed: what PoolLayout.grown() takes; collective if it must grow.

        facts: what all ranks must have given alike, a dict by name, since what they need, and what their kernels write
        to each other, follows from it; compared when they are new. Errors: EPValueError, on all ranks, which says what
        differs.
        """
        self._agree(facts)
        layout = self.pool_layout.grown(**needs)
        if layout != self.pool_layout:
            self._grow(layout)

    def want_pool_for_tokens(self, facts, needs):
        """want_pool() for needs(most tokens of any rank), where ranks may know only their own number."""
        self._agree(facts)
        if self.pool_layout.grown(**needs(self.max_tokens)) != self.pool_layout:
            self.want_tokens(max(self.world.tell(self.max_tokens, self.timeout)))
            self._grow(self.pool_layout.grown(**needs(self.max_tokens)))

    def _agree(self, facts):
        self.recent.append((self.number, facts))
        key = tuple(facts.items())
        if key in self._agreed:
            return
        call = facts["call"]
        try:
            self.world.same(f"what the ranks gave to {call}", facts, self.timeout)
        except PeerTimeout as late:
            raise PeerTimeout(
                f"{late}. This rank calls {as_called(facts)}: do all ranks make the same calls, with "
                "the same sizes?"
            ) from None
        self._agreed.add(key)

    def _grow(self, layout):
        self.changed()
        self.machine.synchronize()
        new = self.world.allocate(layout.nbytes, "rows pool", layout.regions(), self.timeout)
        if self._pool is not None:
            self._retired.append((self._pool, self._heaps()))  # results in use lie there
        self._pool, self.pool_layout = new, layout
        for r in self.ranks:
            layout.clear(new.buffers[r.rank])
        self._make_heaps()
        self.world.barrier("start", self.timeout)

    def _make_heaps(self):
        """Each rank lends results from the pool that there is now."""
        for r in self.ranks if self._pool is not None else ():
            buffer = self._pool.buffers[r.rank]
            if r.heap.buffer is not buffer:
                r.heap = Heap(
                    self.machine, buffer, self.pool_layout.heap_at, self.pool_layout.nbytes
                )

    def _begin_anew(self):
        """No pool, and as much control memory as at the beginning; what results lie in stays."""
        if self._pool is not None:
            self._retired.append((self._pool, self._heaps()))
        self._retired.append((self._control, {}))
        self._pool, self.pool_layout, self._control, self.n_local_experts = (
            None,
            PoolLayout(),
            None,
            0,
        )
        self.want_experts(INITIAL_LOCAL_EXPERTS, dict(call="reset"))

    def _heaps(self):
        return {r.rank: r.heap for r in self.ranks}

    def staging(self, r):
        """Address of a rank's staging area."""
        return (
            self._pool.buffers[r.rank].address + self.pool_layout.staging_at
            if self._pool is not None
            else 0
        )

    @property
    def allocated_bytes(self):
        """Bytes of one rank: control, pool, and memory of its own."""
        r = self.ranks[0]
        scratch = sum(memory.nbytes for memory in (r.scratch, *r.retired))
        own = r.words.nbytes + scratch + r.arena.allocated_bytes
        return self.layout.nbytes + self.pool_layout.nbytes + own

    @property
    def lent_bytes(self):
        """Bytes of one rank's own memory that results in use lie in; what lies in the pool is not counted."""
        return self.ranks[0].arena.lent_bytes

    # ------------------------------------------------------------------ launches
    def find(self, kernel, rank, num_tokens, grid):
        """A launch of a kernel of a rank; its words begin with what every launch of the rank is given."""
        r = self.ranks[list(self.world.ranks).index(rank)]
        pool, layout = [0] * self.n_ranks, self.pool_layout
        if self._pool is not None:
            pool = list(self._pool.addresses)
        if self._streams is None:
            with self.world.launching(True) as streams:
                self._streams = streams
        words = [0] * parameter_block(self.n_ranks).n_words
        fill(
            words,
            dict(
                context=self.launches.context(
                    rank, dict(control_ptrs=list(self._control.addresses), pool_ptrs=pool)
                ),
                notes_at=self.layout.notes,
                note_bytes=self.layout.note_bytes,
                words=r.words.address,
                timeout_ns=max(1, int(self.timeout * 1e9)),
                columns=r.scratch.address,
                lamport_at=layout.lamport_at,
                lamport_bytes=layout.lamport_bytes,
            ),
        )
        return self.launches.prepare(kernel, rank, num_tokens, self._streams[rank], words, grid)

    def start(self, launches, n_told=None):
        """Start one launch of each rank of this process. In the simulator they have ended when this returns.

        Nothing between them may wait for the GPU: some ranks' kernels would begin, and wait for the others'.
        n_told: these are dispatches that tell the host their counts, with so many experts a rank: returns what they tell.
        """
        if n_told is not None:
            number, addresses = self.host_words.begin()
            for launch, address in zip(launches, addresses):
                launch.words[TOLD], launch.words[TOLD_NUMBER] = address, number
        if self.is_alone:
            for launch in launches:
                launch.start()
        else:
            with self.world.launching(True):
                for launch in launches:
                    launch.start()
        if n_told is not None:
            return self.told(n_told)
        if device.SIM:
            self.check()

    def expect_open(self):
        """Raise EPStateError after close, or after an error that left the words in the middle of a call."""
        if self.closed:
            raise EPStateError("this Buffer is closed: get_buffer makes a new one")
        if self.failure is not None:
            raise EPStateError(
                f"{self.failed_call} was ended by {in_short(self.failure)}, so flags and words are in "
                "the middle of a call: call reset() of the Buffer on all ranks first"
            )

    def expect_no_capture(self, call, remedy):
        """Raise EPStateError if a call whose results the host waits for is captured into a CUDA graph."""
        if self.is_captured:
            raise EPStateError(
                f"{call} waits for its number of rows, and the stream is being captured into a CUDA graph, "
                f"so nothing runs yet: {remedy}"
            )

    def check(self):
        """Wait for the kernels; raise PeerTimeout if a wait expired, EPValueError if ids in device memory were bad."""
        words = (np.int32, (STATUS_BYTES // 4,), mailbox.STATUS)
        self._raise_what_failed([r.words.read(*words) for r in self.ranks])

    def prepare_to_be_told(self, n_local_experts):
        """Memory for what dispatches tell; before their launch."""
        self.host_words.prepare(4 * written.told_words(self.n_ranks, n_local_experts))

    def told(self, n_local_experts):
        """What a dispatch tells the host: a Told of each rank here; raises as check().

        The host polls its own memory. It goes on when counts are known, while rows are on their way; if some do not
        arrive, the next call that waits raises it, as with a dispatch on the device. The most tokens of a rank are
        remembered, also where there was room for all rows: the next call may not look.
        """
        try:
            of_ranks = self.host_words.wait(self._timeout)
        except EPError as error:
            if device.SIM or not isinstance(error, PeerTimeout):  # else kernels still run
                self.check()
            raise
        if any(raw[:STATUS_BYTES] != ALL_WELL for raw in of_ranks):
            n = written.TOLD_STATUS
            self._raise_what_failed([np.frombuffer(raw, np.int32, n) for raw in of_ranks])
        if device.SIM:
            self.check()  # kernels have ended, as behind other launches
        told = [self._heard(raw, n_local_experts) for raw in of_ranks]
        self.want_tokens(max(told[0].tokens))
        return told

    def _heard(self, raw, n_local_experts):
        n, status = self.n_ranks, 4 * written.TOLD_STATUS
        has_room, padded_rows, *more = self._info.unpack_from(raw, status + 8 * n_local_experts)
        counts = [more[i : i + n] for i in range(n, n + n * n, n)]
        per_expert = np.frombuffer(raw, np.int64, n_local_experts, status)
        return Told(bool(has_room), padded_rows, more[:n], counts, per_expert)

    def _raise_what_failed(self, status):
        timeouts, bad_ids = [], []
        for r, words in zip(self.ranks, status):
            if not any(words.tolist()):  # few words, which NumPy takes longer for
                continue
            n, at, buffer = self.world.n_ranks, self.layout, self._control.buffers[r.rank]
            try:
                notes = buffer.read(np.uint64, (2, n, at.note_bytes // 8), at.notes)
                rows_wait.raise_if_failed(
                    words, r.rank, self.timeout, notes[:, :, mailbox.NUM_TOKENS] >> np.uint64(32)
                )
                r.words.fill(0, mailbox.STATUS, STATUS_BYTES)
                rows_wait.raise_if_bad_ids(words, r.rank)
            except PeerTimeout as error:
                timeouts.append(error)
            except EPValueError as error:
                bad_ids.append(error)
        if timeouts:
            said = "\n".join(map(str, timeouts)) + compared(self.recent, self.world, self.timeout)
            self.failure = PeerTimeout(said)
            raise self.failure
        if bad_ids:
            raise bad_ids[0]

    def reset(self):
        """After an error: words and flags as before the first call. Collective; handles and results stay good."""
        self.call("reset", self._reset)
        self.failure = None

    def _reset(self):
        self.machine.synchronize()
        self.world.barrier("reset", 2 * self.timeout)  # a slower rank comes after its own timeout
        self._agreed.clear()
        self.recent.clear()
        self.number = 0
        self.changed()
        sizes = self.world.tell([self.n_local_experts, *self.pool_layout], self.timeout)
        if any(
            one != sizes[0] for one in sizes
        ):  # memory had grown on some ranks when a call ended
            self._begin_anew()
        else:
            self._make_heaps()
            self.initialise()

    def close(self, *, collective=True):
        """Free everything, but memory of results in use: that follows when nobody holds them. Collective by default."""
        if self.closed:
            return
        self.closed = True
        self.changed()
        self.machine.synchronize()
        if collective and self.failure is None:
            self.world.barrier("leaving", self.timeout)
        self.captured.clear()
        self.launches.close()
        self.placing.close()
        self.host_words.free()
        for r in self.ranks:
            r.words.free()
            for scratch in (r.scratch, *r.retired):
                scratch.free()
            r.arena.close()
        pool = [] if self._pool is None else [(self._pool, self._heaps())]
        for memory, heaps in [*self._retired, (self._control, {}), *pool]:
            memory.free(collective and self.failure is None, self.timeout, heaps)
        self._retired = []
