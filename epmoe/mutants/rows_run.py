"""One run of a rows world: the host functions of epmoe.fused_a2a with edited kernels, most calls in flight at once.

The host must wait for the first dispatches. The later calls do not depend on each other's results, so they are
queued without waiting, and ranks may be a call or two apart.
"""

import sys
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from types import ModuleType

import numpy as np

from epmoe.device import (
    block_dim,
    block_idx,
    globaltimer,
    grid_dim,
    i32,
    kernel,
    ld_acquire_sys_u64,
    load_u32,
    load_u64,
    thread_idx,
    u64,
)
from epmoe.device.telling import HEADER
from epmoe.fused_a2a.buffer import Buffer
from epmoe.host.memory_pool import Arrangement
from epmoe.kernels import LaunchConfig
from epmoe.kernels.rows import mailbox, wait
from epmoe.kernels.rows.shape import parameter_block
from epmoe.layout import ABSENT
from epmoe.mutants import rows_bad_ids
from epmoe.mutants.errors import Leftover, WrongResult
from epmoe.mutants.rows_calls import CALLS, DISPATCHES, Inputs, expected, flat, on_device
from epmoe.worlds.local import LocalWorld
from epmoe_ref.errors import PeerTimeout

TIMEOUT = 1e-2  # seconds of the simulated clock
SMALLEST = Arrangement("smallest", {"smallest": ((1,), np.uint8)})


@kernel
def read_everything(params, num_tokens, my_rank):
    """Read some arrays, as a user's next kernel would. Parameters: how many, then address and words of each."""
    n, k = i32(load_u64(params)), i32(0)
    while k < n:
        address = load_u64(params + u64(8 + 16 * k))
        words = i32(load_u64(params + u64(16 + 16 * k)))
        i = i32(block_idx() * block_dim() + thread_idx())
        while i < words:
            load_u32(address + u64(4) * u64(i))
            i = i32(i + grid_dim() * block_dim())
        k = i32(k + 1)


@kernel(words=3)
def host_waits(params, num_tokens, my_rank):
    """One thread acts as the host: it polls for the number of a call, then reads the call's results."""
    word, number, n_words = params
    since, i = u64(globaltimer()), u64(0)
    while ld_acquire_sys_u64(word) != number:
        if u64(globaltimer()) - since > u64(2 * TIMEOUT * 1e9):
            return
    while i < n_words:
        load_u32(word + u64(HEADER) + u64(4) * i)
        i = u64(i + u64(1))


class RowsRun:
    """One run. go() raises any error of the simulator or the check."""

    def __init__(self, world, kernels, seed, *, racecheck=True, **simulation):
        self.world, self.kernels = world, kernels
        self.local = LocalWorld(
            world.n_ranks,
            seed=seed,
            racecheck=racecheck,
            expire_waits=bool(world.left_out),
            **simulation | (dict(stale=True) if world.stale else {}),
        )
        self.machine = self.local.machine
        self.machine.slow_ranks = world.slow
        self.flying, self.read_from, self.lent = False, [], []

    def go(self):
        """Run the world's rounds with the edited kernels. Raises the error that notices the edit."""
        blocks, threads = self.world.shape
        with self._edited():
            buffer = Buffer(self.local, launch=LaunchConfig(blocks, threads, trace=self.world.trace), timeout=TIMEOUT)
            buffer.max_tokens = int(self.world.asks)  # 0: it learns of the others'
            self._let_hosts_wait(buffer.host_words)
            try:
                if not self.world.bad_ids:
                    return self._go(buffer)
                with rows_bad_ids.counted(Inputs(self.world).ids, self.world.n_experts, DISPATCHES, self.kernels):
                    self._go(buffer)
            finally:
                self.machine.__dict__.pop("synchronize", None)
                for block in self.read_from:
                    block.free()
                buffer.close(collective=False)

    def _go(self, buffer):
        functions = [self._then_read(f, buffer) for f in on_device(self.world, buffer)]
        inputs = Inputs(self.world, spoilt=self.world.bad_ids)
        if self.world.crowded:
            return self._go_crowded(buffer, functions[0], inputs)
        results = CALLS[self.world.kind](self.world, inputs, functions, lambda: self._in_flight(buffer))
        if self.world.left_out:
            return self._check_expired(buffer)
        buffer.check()
        buffer.placing.let_go()
        for number, (got, want) in enumerate(zip(flat(results), expected(self.world), strict=True)):
            if got.shape != want.shape or got.tobytes() != np.ascontiguousarray(want).tobytes():
                raise WrongResult(f"{self.world.name}: array {number} of the results differs from the reference")
        self._check_memory(buffer)

    def _go_crowded(self, buffer, dispatch, inputs):
        """Hybrid dispatches after one that had enough room, as if ranks had not announced their numbers of tokens."""
        given = inputs.rows(self.world.tokens), inputs.maps
        dispatch(*given, None)
        buffer.max_tokens, buffer.want_tokens = 1, lambda n: None
        buffer.changed()
        with self._in_flight(buffer):
            for _ in range(2):
                dispatch(*given, None)
        buffer.check()
        buffer.placing.let_go()
        self._check_memory(buffer)

    def _let_hosts_wait(self, words):
        """For each call with results for the host, launch a thread of each rank that waits for them like the host."""
        ranks, begin = self.local.ranks, words.begin
        streams = [self.machine.stream(other) for other in (*ranks[1:], ranks[0])]

        def begin_and_wait():
            number, addresses = begin()
            n_words = (addresses[1] - addresses[0] - HEADER) // 4
            for rank, (stream, address) in enumerate(zip(streams, addresses)):
                params = address, number, n_words
                self.machine.launch(host_waits, 1, 1, (params, 0, rank), stream=stream)
            return number, addresses

        words.begin = begin_and_wait

    def _then_read(self, function, buffer):
        """The function; after each call in flight, a kernel of each rank reads its results."""

        def call(*arguments):
            if self.flying:
                self._fill_heaps(buffer)
            results = function(*arguments)
            if self.flying:
                # and a handle, or None
                made = results[0] if isinstance(results, tuple) else results
                columns = made if isinstance(made[0], list) else [made]
                if self.world.limit is None and len(columns) == 4:
                    columns = columns[:3]  # the host was told tokens_per_expert
                columns = [column for column in columns if column is not None]
                for rank in set(self.local.ranks) - set(self.world.left_out):
                    self._read(rank, [column[rank] for column in columns])
            return results

        return call

    def _fill_heaps(self, buffer):
        for rank in self.world.full_heap:
            heap = buffer.heaps[rank]  # a call that grew the pool has replaced it
            while (loan := heap.lend(SMALLEST)) is not None:
                self.lent.append(loan)

    def _read(self, rank, arrays):
        arrays = [a for a in flat(arrays) if a.nbytes]
        words = [len(arrays), *(n for a in arrays for n in (a.ctypes.data, a.nbytes // 4))]
        block = self.machine.alloc(8 * len(words), "what is read", rank)
        block.write(np.array(words, np.uint64))
        self.read_from.append(block)
        self.machine.launch(read_everything, 2, 32, (block.address, 0, rank), stream=self.local.stream_of(rank))

    @contextmanager
    def _in_flight(self, buffer):
        """Context of calls that are queued and wait only for counts. All memory that they use stays until they have run."""
        place, number, kept = buffer.placing.place, count(), []
        run_all = self.machine.synchronize
        buffer.host_words.wait = lambda timeout: run_all()
        self.machine.synchronize = buffer.placing.let_go = buffer._free_outgrown = lambda *keys: None
        buffer.placing.place = lambda rank, name, *more: place(rank, f"{name} {next(number)}", *more)
        lenders = [*(r.arena for r in buffer.ranks), *buffer.heaps.values()]
        for lender in lenders:
            lender.lend = lambda *what, lend=lender.lend: kept.append(lend(*what)) or kept[-1]
        if self.world.left_out:
            self._leave_out(buffer)
        self.flying = True
        try:
            yield
        finally:
            self.flying = False
            del self.machine.synchronize, buffer.placing.let_go, buffer.placing.place
            del buffer.host_words.wait, buffer._free_outgrown
            for lender in lenders:
                del lender.lend
        self.machine.synchronize()

    def _leave_out(self, buffer):
        prepared, self.words, world = self.machine.prepared, [0] * parameter_block(1).n_words, self.world

        def prepared_unless_absent(kernel, grid, *what, **how):
            rank = what[-1]
            return self if rank in world.absent else prepared(kernel, 1 if rank in world.mute else grid, *what, **how)

        buffer.changed()
        self.machine.prepared = prepared_unless_absent

    def start(self, *words):
        """Do nothing, as the launch of an absent rank."""

    def _check_expired(self, buffer):
        """The first call without all ranks must have expired, and later calls must not have begun."""
        left_out = self.world.left_out
        rank = min(set(self.local.ranks) - set(left_out))
        epoch = int(buffer.ranks[rank].words.read(np.uint64, (1,), mailbox.EPOCH)[0]) + 1
        try:
            buffer.check()
        except PeerTimeout:
            self._check_late_ranks(buffer)
            note = buffer.layout.mailbox(epoch & 1, rank) + mailbox.PLACES
            places = buffer.control.buffers[left_out[0]].read(np.uint64, (3,), note)
            # combine's probs use it, but no later cached dispatch does
            if not places[2] & np.uint64(2**32 - 1):
                raise Leftover(
                    f"the note of epoch {epoch} belongs to a later call, which went on after a wait had expired"
                ) from None
            return
        raise WrongResult("no wait expired, though a rank was absent or mute")

    def _check_late_ranks(self, buffer):
        """Next to mute ranks, every other rank must have waited for their rows, and must name one of them."""
        mute = self.world.mute
        for r in buffer.ranks if mute else ():
            phase, waited_for, late = r.words.read(np.int32, (3,), mailbox.STATUS).tolist()
            expected = phase == wait.ROWS_COMBINE and waited_for == wait.FOR_WINDOW and late in mute
            if r.rank not in mute and not expected:
                raise WrongResult(
                    f"status of rank {r.rank} begins with {phase}, {waited_for}, {late}; it must be "
                    f"{wait.ROWS_COMBINE}, {wait.FOR_WINDOW} and one of the mute ranks {mute}"
                )

    def _check_memory(self, buffer):
        for r in buffer.ranks:
            words = r.words.read(np.int32, (mailbox.WORDS_BYTES // 4,))
            if words[mailbox.BEGUN // 4] or words[mailbox.STATUS // 4 :].any():
                raise Leftover(f"words of rank {r.rank} after the calls: {words.tolist()}")
            # counters of the last call stay until the next one, which uses those of the other parity
            other = 1 - int(words[mailbox.EPOCH // 4]) % 2
            arrived = buffer.control.buffers[r.rank].read(np.int32, (2, self.world.n_ranks), buffer.layout.arrived)
            if arrived[other].any() or any(words[at // 4 + other] for at in mailbox.BY_PARITY):
                raise Leftover(f"counters of rank {r.rank} after the calls: {arrived.tolist()}, {words.tolist()}")
            self._check_lamport_rows(buffer, r.rank)

    def _check_lamport_rows(self, buffer, rank):
        """Every word must hold ABSENT again, whether its reader took it or did not need it."""
        pool, layout = buffer.pool.buffers[rank], buffer.pool_layout
        words = pool.read(np.uint32, (2, layout.lamport_bytes // 4), layout.lamport_at)
        if (words != ABSENT).any():
            parity, word = np.argwhere(words != ABSENT)[0].tolist()
            raise Leftover(
                f"Lamport rows[parity {parity}, word {word}] of rank {rank} hold "
                f"{words[parity, word]} after the calls, not ABSENT"
            )

    @contextmanager
    def _edited(self):
        """The host functions, using the rows kernels of the edited package, with its layout of memory."""
        original, edited = "epmoe.kernels", self.kernels.__name__
        users = [m for name, m in sys.modules.items() if name.startswith("epmoe.fused_a2a.")]
        before = []
        for module in users:
            for name, value in list(vars(module).items()):
                home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
                if f"{home}.".startswith(f"{original}.rows."):
                    twin = import_module(edited + home.removeprefix(original))
                    before.append((module, name, value, twin if isinstance(value, ModuleType) else vars(twin)[name]))
        factories = import_module(f"{edited}.rows")
        assert {name for _, name, *_ in before} >= {name for name in vars(factories) if name.endswith("_kernel")}
        try:
            for module, name, _, twin in before:
                setattr(module, name, twin)
            yield
        finally:
            for module, name, value, _ in before:
                setattr(module, name, value)
