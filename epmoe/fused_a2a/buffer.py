"""Buffer: the memory behind the rows functions of one group, and what keeps its calls apart."""

from contextlib import contextmanager

import numpy as np
from epmoe_ref.errors import EPStateError, EPValueError, PeerTimeout

from epmoe import device
from epmoe.fused_a2a.heap import Arena, Heap
from epmoe.fused_a2a.launches import Launches
from epmoe.fused_a2a.steady import SteadyCalls
from epmoe.host.placing import Placing
from epmoe.kernels.rows import control, row_flags
from epmoe.kernels.rows import status as rows_status

ALIGNMENT = 256         # bytes
RESULTS_AT_ONCE = 2     # results in the pool that may be in use while another call needs room
INITIAL_LOCAL_EXPERTS = 64
STATUS_BYTES = 64


def align(nbytes):
    """nbytes, rounded up so that an array may begin there."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _grown(has, needs):
    """Bytes for a part of the pool: it grows by half at least, so that all earlier pools together are not much."""
    return has if needs <= has else align(max(needs, has + has // 2))


class _Rank:
    """One rank of this process: its own words and scratch, its arena, and its heap in the pool."""

    def __init__(self, machine, rank):
        self.rank, self.arena = rank, Arena(machine, rank)
        self.words = machine.alloc(control.WORDS_BYTES, "rows words", rank)
        self.scratch = None         # columns of the layout
        self.heap = Heap(machine, None, 0, 0)


class Buffer:
    """Memory and launches for the fused_a2a functions of one group.

    group: a world (LocalWorld, MPIWorld). hidden_bytes: of a row, as get_hidden_bytes tells; the rest is known when
    rows come. timeout [s]: after it a wait gives up and PeerTimeout is raised. launch: LaunchConfig.

    Three kinds of memory: control, a few kB that peers write; the pool, which they write rows into: flags of rows,
    words of tagged rows, windows for few rows and for Lamport rows, a staging area and behind it a heap of results; and
    each rank's own memory. The pool grows, on all ranks in the same call, and never shrinks; results and handles that
    are in use survive that. A result that finds no room in the heap is received in the staging area and moved to memory
    of its own, so the numbers never depend on who holds on to what.
    """

    def __init__(self, group, hidden_bytes=0, *, timeout=30.0, launch=None):
        self.world, self.machine = group, group.machine
        self.hidden_bytes, self.timeout = hidden_bytes, float(timeout)
        self.launches = Launches(group, launch)
        self.placing = Placing(self.machine, lambda rank: self.world.stream_of(rank))
        self.ranks = [_Rank(self.machine, rank) for rank in group.ranks]
        self.n_local_experts, self.max_tokens = 0, 0
        # With all ranks in one process every rank's number of tokens is known before the launch.
        self.knows_all_ranks = bool(group.lists)
        self.flag_bytes = self.tagged_bytes = self.lamport_bytes = self.window_bytes = 0
        self.staging_bytes = self.heap_bytes = 0
        self._failure, self.closed = None, False
        self.fp8_dispatch = False   # HybridEPDispatch: send blockwise FP8
        self._reading = self.machine.reading()
        self.steady = SteadyCalls(self)
        self._control = self._pool = None
        self._retired = []
        self.want_experts(INITIAL_LOCAL_EXPERTS)

    @property
    def failure(self):
        """The error after which only reset() helps, or None."""
        return self._failure

    @failure.setter
    def failure(self, error):
        self._failure = error
        self.steady.changed()

    # ------------------------------------------------------------------ memory
    def want_experts(self, n_local_experts):
        """Control memory for so many experts a rank. Collective if it must grow; all ranks ask for the same."""
        if n_local_experts <= self.n_local_experts:
            return
        self.machine.synchronize()
        self.steady.changed()
        n_ranks = self.world.n_ranks
        if self._control is not None:
            self._retired.append(self._control)
        self.n_local_experts, self.layout = n_local_experts, control.control(n_ranks, n_local_experts)
        self._control = self.world.allocate(self.layout.nbytes, "rows control", self._regions(), self.timeout)
        n_columns, blocks = n_ranks * (1 + n_local_experts), self.launches.most_blocks
        for r in self.ranks:
            if r.scratch is not None:
                r.scratch.free()
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
                self._clear_pool(r)
        self.world.barrier("reset", self.timeout)

    def want_tokens(self, max_tokens):
        """Remember the most tokens of any rank; all ranks are told the same."""
        if max_tokens > self.max_tokens:
            self.max_tokens = max_tokens
            self.steady.changed()

    def has_pool(self, staging_bytes, result_bytes=0, flag_rows=0, window_bytes=0, tagged_bytes=0, lamport_bytes=0):
        """Whether want_pool() need not let it grow for this."""
        return (align(max(staging_bytes, result_bytes)) <= self.staging_bytes and result_bytes <= self.heap_bytes
                and align(row_flags.bytes_for(flag_rows)) <= self.flag_bytes and window_bytes <= self.window_bytes
                and tagged_bytes <= self.tagged_bytes and lamport_bytes <= self.lamport_bytes)

    def want_pool(self, staging_bytes, result_bytes=0, flag_rows=0, window_bytes=0, tagged_bytes=0, lamport_bytes=0):
        """A pool with a staging area of so many bytes, room for results, flags for so many rows, windows, words.

        window_bytes, tagged_bytes, lamport_bytes: of one parity.

        Collective if it must grow. All ranks ask for the same: what they ask for follows from what all of them know.
        """
        staging_bytes, flag_bytes = align(max(staging_bytes, result_bytes)), align(row_flags.bytes_for(flag_rows))
        if self.has_pool(staging_bytes, result_bytes, flag_rows, window_bytes, tagged_bytes, lamport_bytes):
            return
        self.steady.changed()
        self.flag_bytes = _grown(self.flag_bytes, flag_bytes)
        self.tagged_bytes = _grown(self.tagged_bytes, tagged_bytes)
        self.lamport_bytes = _grown(self.lamport_bytes, lamport_bytes)
        self.window_bytes = _grown(self.window_bytes, window_bytes)
        self.staging_bytes = _grown(self.staging_bytes, staging_bytes)
        self.heap_bytes = _grown(self.heap_bytes, align(result_bytes) * RESULTS_AT_ONCE)
        self.machine.synchronize()
        if self._pool is not None:
            self._retired.append(self._pool)    # results in use lie there
        heap_at = self.staging_at + self.staging_bytes
        nbytes, n_flags = heap_at + self.heap_bytes, self.flag_bytes // row_flags.bytes_for(1)
        regions = [("row flags", 0, (n_flags, row_flags.PARTS), np.uint32, ("row", "part")),
                   ("tagged rows", self.flag_bytes, (2, self.tagged_bytes // 8), np.uint64, ("parity", "word")),
                   ("Lamport rows", self._lamport_at, (2, self.lamport_bytes // 4), np.uint32, ("parity", "word")),
                   ("rows windows", self._windows_at, (2, self.window_bytes), np.uint8, ("parity", "byte")),
                   ("rows staging", self.staging_at, (self.staging_bytes,), np.uint8, ("byte",)),
                   ("rows results", heap_at, (self.heap_bytes,), np.uint8, ("byte",))]
        self._pool = self.world.allocate(nbytes, "rows pool", regions, self.timeout)
        for r in self.ranks:
            self._clear_pool(r)
            r.heap = Heap(self.machine, self._pool.buffers[r.rank], heap_at, nbytes)
        self.world.barrier("start", self.timeout)

    def _clear_pool(self, r):
        """Flags and words name no call, and of Lamport rows nothing has come."""
        self._pool.buffers[r.rank].fill(0, 0, self._lamport_at)
        self._pool.buffers[r.rank].fill(0xFF, self._lamport_at, 2 * self.lamport_bytes)

    @property
    def _lamport_at(self):
        """Where in the pool Lamport rows lie: behind the flags, and the words of tagged rows of both parities."""
        return self.flag_bytes + 2 * self.tagged_bytes

    @property
    def _windows_at(self):
        """Where in the pool the windows lie: behind Lamport rows of both parities."""
        return self._lamport_at + 2 * self.lamport_bytes

    @property
    def staging_at(self):
        """Where in the pool the staging area lies: behind the windows of both parities."""
        return self._windows_at + 2 * self.window_bytes

    def staging(self, r):
        """Address of a rank's staging area."""
        return self._pool.buffers[r.rank].address + self.staging_at if self._pool is not None else 0

    def offset(self, r, address):
        """Where in the pool an address lies."""
        return address - self._pool.buffers[r.rank].address

    @property
    def allocated_bytes(self):
        """Bytes of one rank: control, pool, and memory of its own."""
        r = self.ranks[0]
        pool = self.staging_at + self.staging_bytes + self.heap_bytes
        return self.layout.nbytes + r.words.nbytes + r.scratch.nbytes + pool + r.arena.allocated_bytes

    @property
    def lent_bytes(self):
        """Bytes of one rank's own memory that results in use lie in; what lies in the pool is not counted.

        What is kept for calls to come, and nobody looks at, is given back first.
        """
        self.steady.give_back()
        return self.ranks[0].arena.lent_bytes

    def _regions(self):
        at, n = self.layout, self.world.n_ranks
        return [("arrived", at.arrived, (2, n), np.int32, ("parity", "src_rank")),
                ("window flags", at.window_flags, (2, n, control.WINDOW_ROWS, control.MOST_PARTS), np.uint32,
                 ("parity", "src_rank", "row", "part")),
                ("notes", at.notes, (2, n, at.note_bytes // 8), np.uint64, ("parity", "src_rank", "word"))]

    # ------------------------------------------------------------------ launches
    def values(self, r):
        """The fields of the parameter block that every launch of a rank has."""
        pool = self._pool.addresses if self._pool is not None else [0] * self.world.n_ranks
        return dict(control_ptrs=list(self._control.addresses), pool_ptrs=list(pool), notes_at=self.layout.notes,
                    note_bytes=self.layout.note_bytes, words=r.words.address,
                    timeout_ns=max(1, int(self.timeout * 1e9)), columns=r.scratch.address, tagged_at=self.flag_bytes,
                    tagged_bytes=self.tagged_bytes, lamport_at=self._lamport_at, lamport_bytes=self.lamport_bytes,
                    windows_at=self._windows_at, window_bytes=self.window_bytes)

    @contextmanager
    def launching(self):
        """Context of one call's launches; gives {rank: stream}. In the simulator the kernels have ended behind it.

        Nothing inside may wait for the GPU: kernels of some ranks would then begin, and wait for those of the others.
        """
        self.expect_open()
        self.launches.trim()
        try:
            with self.world.launching(True) as streams:
                yield streams
            if device.SIM:
                self.check()
        except EPValueError:        # bad ids: the call was done without them
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise

    @contextmanager
    def letting_go(self):
        """Context of one call: afterwards the simulator lets go of the caller's arrays."""
        try:
            yield
        finally:
            if device.SIM:
                self.machine.synchronize()
                self.placing.let_go()

    def launch_all(self, kernel, calls, num_sms=None):
        """Launch a kernel on every rank of this process.

        calls: (rank, fields of the parameter block, num_tokens), and rows that it moves if that is not a row a token.
        """
        with self.launching() as streams:
            for rank, values, num_tokens, *n_rows in calls:
                self.launches.start(kernel, rank, values, num_tokens, streams[rank], num_sms, *n_rows)

    def expect_open(self):
        """Raise EPStateError after close, or after an error that left the words in the middle of a call."""
        if self.closed:
            raise EPStateError("this Buffer is closed: get_buffer makes a new one")
        if self.failure is not None:
            first_line = str(self.failure).partition("\n")[0]
            raise EPStateError(f"after {type(self.failure).__name__} ({first_line}) flags and words are in the middle "
                               "of that call: call reset() of the Buffer on all ranks first")

    def check(self):
        """Wait for the kernels; raise PeerTimeout if a wait expired, EPValueError if ids in device memory were bad."""
        self.machine.synchronize()
        self.told()

    def told(self, loans=(), *names):
        """check(), and what the kernels have written for the host: [arrays of these names] of each rank's loan.

        names: fields of the loans; of those that follow each other in memory, in this order, a GPU makes one copy.
        """
        if self.world.lists:
            self.machine.synchronize()      # kernels have streams of their own
        status = [(self.world.stream_of(r.rank), r.words, control.STATUS, STATUS_BYTES) for r in self.ranks]
        of_loans = [(stream, loan.buffer, loan.fields[name].offset, loan.fields[name].nbytes)
                    for (stream, *_), loan in zip(status, loans) for name in names]
        seen = iter(self._reading.read(status + of_loans))
        self._raise_what_failed([next(seen).view(np.int32) for _ in status])
        return [[next(seen).view(f.dtype).reshape(f.shape) for f in map(loan.fields.get, names)] for loan in loans]

    def _raise_what_failed(self, status):
        timeouts, bad_ids = [], []
        for r, words in zip(self.ranks, status):
            if not words.any():
                continue
            n, at, buffer = self.world.n_ranks, self.layout, self._control.buffers[r.rank]
            try:
                notes = buffer.read(np.uint64, (2, n, at.note_bytes // 8), at.notes)
                rows_status.raise_if_failed(words, r.rank, self.timeout, notes[:, :, control.TOKENS] >> np.uint64(32))
                r.words.fill(0, control.STATUS, STATUS_BYTES)
                rows_status.raise_if_bad_ids(words, r.rank)
            except PeerTimeout as error:
                timeouts.append(error)
            except EPValueError as error:
                bad_ids.append(error)
        if timeouts:
            self.failure = timeouts[0] if len(timeouts) == 1 else PeerTimeout("\n".join(map(str, timeouts)))
            raise self.failure
        if bad_ids:
            raise bad_ids[0]

    def reset(self):
        """After an error: words and flags as before the first call. Collective; handles and results stay good."""
        self.machine.synchronize()
        self.initialise()
        self.failure = None

    def close(self, *, collective=True):
        """Free everything; results in a rank's own memory live on, those in the pool lose it. Collective by default."""
        if self.closed:
            return
        self.closed = True
        self.steady.changed()
        self.machine.synchronize()
        if collective and self.failure is None:
            self.world.barrier("leaving", self.timeout)
        self.launches.close()
        self.steady.close()
        self.placing.close()
        self._reading.free()
        for r in self.ranks:
            r.words.free()
            r.scratch.free()
            r.arena.close()
        for memory in [*self._retired, self._control, self._pool]:
            if memory is not None:
                memory.free(collective and self.failure is None, self.timeout)
        self._retired = []
