"""Buffer runs one group's calls, one at a time; it keeps their plans and reports errors."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import get_ident

import numpy as np

from epmoe import device
from epmoe.fused_a2a.launches import Launches
from epmoe.fused_a2a.memory import GroupMemory
from epmoe.host import inputs
from epmoe.host.arrays import look
from epmoe.host.memory_pool import results_of
from epmoe.host.placing import Placing
from epmoe.host.rounds import REFUSALS, Turn
from epmoe.kernels.rows import mailbox, wait
from epmoe.kernels.rows.handle import HAS_ROOM, PADDED_ROWS, TOKENS, TOLD_STATUS, told_words
from epmoe.worlds.time_limit import seconds
from epmoe_ref.errors import EPError, EPStateError, EPValueError, PeerTimeout

STATUS_BYTES = 4 * TOLD_STATUS


@dataclass(eq=False)
class Interface:
    """How a kind of caller (NumPy, torch) gives arrays and gets results.

    look: see host.arrays.look(). results_of: see memory_pool.results_of(). wrap: gives the caller a NumPy array on the
    host, without a copy, since the array is filled later. in_order(buffer): makes the next launches wait for the
    caller's stream. It returns None if results need nothing more, or else a function that takes the call's results,
    makes the caller's stream wait for them, and returns them for the caller.
    """

    look: Callable
    results_of: Callable
    wrap: Callable
    in_order: Callable | None = None


PLAIN = Interface(look, results_of, np.asarray)


class Again(Exception):
    """A call begins again: its handle's Buffer is closed, or a rank had no room.

    In the latter case no rank has sent rows, and all know the most tokens now.
    """


class Buffer(GroupMemory):
    """Memory and launches for the fused_a2a functions of one group.

    group: a world (LocalWorld, MPIWorld). Sizes follow from the calls. timeout [s]: after it a wait gives up and
    PeerTimeout is raised. launch: LaunchConfig.
    """

    remedy = "reset() of the Buffer"  # what to call after an error

    def __init__(self, group, *, timeout=30.0, launch=None):
        timeout, stream = seconds("timeout", timeout), group.stream_of(group.ranks[0])
        self.capture = stream.capture
        # (number of the GPU, handle): epmoe.torch compares it with torch's current stream
        self.stream = getattr(group.machine, "ordinal", 0), int(getattr(stream, "handle", 0))
        self.copies = getattr(group, "copies", None)  # whether results of epmoe.torch are copied
        # group may be a proxy, and its bound methods would keep the world alive
        self.placing = Placing(group.machine, lambda rank: self.world.stream_of(rank))
        self.world_has_lists = bool(group.lists)
        self.closed = False
        self.captured = []  # what graphs use at every replay: Loans of calls, and of their handles
        self.fp8_dispatch = False  # HybridEPDispatch: send blockwise FP8
        self._info = struct.Struct(f"={TOKENS + group.n_ranks + group.n_ranks**2}i")
        self._all_well = [bytes(STATUS_BYTES)] * len(group.ranks)  # status words without an error
        self.turn = Turn()
        super().__init__(group, Launches(group, launch), timeout)  # allocates memory, and so needs the attributes above

    @property
    def timeout(self):
        """Seconds after which a wait gives up."""
        return self._timeout

    @timeout.setter
    def timeout(self, value):
        self._timeout = seconds("timeout", value)
        self.changed()

    # ------------------------------------------------------------------ calls
    def call(self, name, kind, names=(), arrays=(), options=(), of=None, interface=PLAIN):
        """Run a call by the plan for arrays of these forms, made if there is none: (results, handle).

        name: of the call. kind: the class of its plan; without arrays, a function to call instead. names: of the arrays.
        options: with name, interface and forms, the plan's key. of: the call's handle; for a dispatch, which makes the
        handle, the group. results: this rank's; or, for each result, a list over ranks (None if no rank has it). After
        any exception but a refusal, including Ctrl-C, the Buffer must be reset.
        """
        turn = self.turn
        try:
            turn.free.pop()
        except IndexError:
            turn.refuse(name)
        turn.thread, again = get_ident(), False
        try:
            try:
                if not arrays:
                    return kind()
                if self.world_has_lists:
                    forms, given = self._look_at_lists(names, arrays, interface.look)
                else:
                    forms, addresses, seen = interface.look(arrays, names)
                    given = ((addresses, seen),)
                leave = interface.in_order and interface.in_order(self)
                is_captured = self.capture() != 0
                if self.unused and not is_captured:
                    self.free_unused()
                if kind.makes is None:
                    rows_vary = kind.rows_vary and of.plan.is_exact
                    forms = (_without_rows(forms, of.num_rows) if rows_vary else forms), of.form
                key = name, interface, options, forms
                plan = self._plans.get(key) or self._plan(key, kind, names, given, of)
                if plan.is_exact:
                    self._prepare_to_wait(plan, is_captured)
                if plan.dtypes is not None:
                    given = self._placed(plan, given)
                log = self.log
                log.number += 1
                log.recent.append((log.number, plan.facts))
                of = of if kind.makes is None else kind.makes(plan, of)
                made = [None] * len(given)
                if self.world_has_lists:
                    made = self._run_together(plan, given, of, made)
                else:
                    for launch, loans in plan.run(0, given[0][0], of, made):
                        if is_captured:
                            self.captured.append((loans, of.loans))
                        launch.start()
                    (made,) = made
                if device.SIM:
                    self.check()
            finally:
                if device.SIM:  # release the caller's arrays
                    self.machine.synchronize()
                    self.placing.let_go()
        except Again:
            again = True
        except REFUSALS:
            raise
        except BaseException as error:
            self._fail(name, error)
            raise
        finally:
            turn.free[:] = (True,)
        if again:
            buffer = of.buffer_of(of.group) if self.closed else self
            of = of if kind.makes is None else of.group
            return buffer.call(name, kind, names, arrays, options, of, interface)
        return made if leave is None else leave(made), of

    def _run_together(self, plan, given, handle, made):
        """Run the call of all ranks of this process; returns lists over ranks.

        In each step every rank prepares a launch, then all launches start together. While they start, nothing may wait
        for the GPU: kernels that run already wait for those of the other ranks.
        """
        runs = [plan.run(i, addresses, handle, made) for i, (addresses, _) in enumerate(given)]
        while steps := [step for run in runs if (step := next(run, None))]:
            if self.capture():
                self.captured.append((steps, handle.loans))
            with self.world.launching(True):
                for launch, _ in steps:
                    launch.start()
        columns = map(list, zip(*made))
        return [None if all(a is None for a in column) else column for column in columns]

    def _plan(self, key, kind, names, given, of):
        """Check everything and make a new plan. given: (addresses, arrays) of each rank, from look()."""
        if self.closed and kind.makes is None:
            raise Again
        self.expect_open()
        name, interface, options, _ = key
        # the arrays from look(), which may have copied one that kernels cannot read in place
        by_name = [list(of_ranks) for of_ranks in zip(*[arrays for _, arrays in given])]
        plan = kind(self, name, interface, names, by_name, options, of)
        if plan.dtypes is None and any(None in addresses for addresses, _ in given):
            plan.dtypes = {}  # arrays in host memory
        if plan.is_exact:  # it is told its numbers of rows
            self.host_words.prepare(4 * told_words(self.n_ranks, plan.local))
        # stored only now: kind() may grow memory, which clears the plans
        self._plans[key] = plan
        return plan

    def _placed(self, plan, given):
        """`given` with arrays placed where kernels can read them, and those addresses."""
        if device.SIM and plan.check_values is not None:
            plan.check_values(given)
        place = self.placing.place_all
        return [(place(r.rank, plan.names, arrays, plan.dtypes), arrays) for r, (_, arrays) in zip(self.ranks, given)]

    def _look_at_lists(self, names, arrays, look):
        """look() at arrays that are lists over ranks: (forms of all, (addresses, arrays) of each rank)."""
        for name, of_ranks in zip(names, arrays):
            if type(of_ranks) is not list or len(of_ranks) != len(self.ranks):
                inputs.ranks_of(self.world, name, of_ranks)
        forms, given = [], []
        for r, of_rank in zip(self.ranks, zip(*arrays)):
            of_arrays, *seen = look(of_rank, [f"{name} of rank {r.rank}" for name in names])
            forms += of_arrays
            given.append(seen)
        return tuple(forms), given

    def expect_open(self):
        """Raise EPStateError after close() or a failed call. Both drop all plans, so only _plan() has to ask."""
        if self.closed:
            raise EPStateError("this Buffer is closed: get_buffer makes a new one")
        if self.turn.failure is not None:
            raise EPStateError(
                f"{self.turn.failed_call} was ended by {self.turn.failure}, and may be half done on some ranks: call "
                f"{self.remedy} on all ranks first"
            )

    def _prepare_to_wait(self, plan, is_captured):
        """Before a call in which the host waits. Raise EPStateError if it is captured, since nothing runs yet."""
        if is_captured:
            raise EPStateError(
                f"{plan.facts['call']} waits for its number of rows, and the stream is being captured into a CUDA "
                f"graph, so nothing runs yet: {plan.remedy}"
            )
        self.host_words.begin()

    def reset(self):
        """After an error: set words and flags as before the first call. Collective; handles and results stay valid."""
        if self.closed:
            self.expect_open()  # raises
        self.call("reset", self.put_back)
        self.turn.failure = None

    def close(self, *, collective=True):
        """Free everything; memory of results in use is freed when they are dropped. Collective by default.

        After an error on some ranks only, call reset() on all first, or close(collective=False): the others would wait.
        EPStateError while another thread is in a call.
        """
        if not self.closed:
            self.call("close", partial(self._close, collective))

    def _close(self, collective):
        self.closed, together = True, False
        self.changed()
        try:
            self.machine.synchronize()
            if collective and self.turn.failure is None:
                self.world.barrier("leaving", self._timeout)
                together = True
        finally:
            self.captured.clear()
            for memory in (self.placing, self.launches.contexts, *self.launches.traces.values()):
                memory.close()
            self.free(together)

    # ------------------------------------------------------------------ what kernels tell
    def told(self, i, n_local_experts, interface):
        """What the i-th rank's dispatch has told the host; for i = 0 it waits for all ranks here. Raises as check().

        Returns (rows, counts, tokens_per_expert). rows: of this rank, with padding, if expert-major. counts: a tuple
        with the number of rows from src_rank to dst_rank at src_rank * R + dst_rank; the same on all ranks.
        tokens_per_expert: int64 [L], as the interface wraps it. If a rank had no room to receive, all raise Again.
        The host polls its own memory. It goes on when counts are known, while rows are still travelling. If some do not
        arrive, the next call that waits raises the error, as after a dispatch on the device. The most tokens of a rank
        are remembered even if all rows had room: a later call that tells the host nothing relies on them.
        """
        # made before the wait, so that less is left to do after it
        counted = np.empty(n_local_experts, np.int64)
        per_expert = interface.wrap(counted)
        raw, end = self.host_words.told[i], STATUS_BYTES + counted.nbytes
        source, target = raw[STATUS_BYTES:end], memoryview(counted).cast("B")
        bad_ids = self._hear() if i == 0 else None
        target[:] = source
        info, counts_at = self._info.unpack_from(raw, end), TOKENS + self.n_ranks
        most_tokens, known = max(info[TOKENS:counts_at]), self.max_tokens  # the same on all ranks
        if most_tokens > known:
            self.want_tokens(most_tokens)
        if most_tokens and not info[HAS_ROOM]:  # where nothing runs (worlds/dry.py), all words are 0
            if most_tokens <= known:
                raise EPError(
                    f"kernels say that {most_tokens} tokens have no room; there is room for {known}: a defect"
                )
            raise Again
        if bad_ids is not None:
            raise bad_ids
        return info[PADDED_ROWS], info[counts_at:], per_expert

    def _hear(self):
        """Wait for what the dispatches of all ranks here tell the host: the EPValueError for bad ids, or None.

        Raises other errors as check(). Those for bad ids wait: if all must begin again, this rank must take part.
        """
        try:
            self.host_words.wait(self._timeout)
        except EPError as error:
            if device.SIM or not isinstance(error, PeerTimeout):  # else kernels still run
                self.check()
            raise
        status = [raw[:STATUS_BYTES].tobytes() for raw in self.host_words.told]
        if status != self._all_well:
            return self._bad_ids_of([np.frombuffer(words, np.int32) for words in status])
        return None

    def check(self):
        """Wait for the kernels; raise PeerTimeout if a wait expired, EPValueError if ids in device memory were bad."""
        words = (np.int32, (STATUS_BYTES // 4,), mailbox.STATUS)
        error = self._bad_ids_of([r.words.read(*words) for r in self.ranks])
        if error is not None:
            raise error

    def _bad_ids_of(self, status):
        """The EPValueError for bad ids that the ranks' status words tell, or None; raises PeerTimeout for waits."""
        timeouts, bad_ids = [], []
        for r, words in zip(self.ranks, status):
            if not any(words.tolist()):  # faster than NumPy for so few words
                continue
            at, control = self.layout, self.control.buffers[r.rank]
            try:
                boxes = control.read(np.uint64, (2, self.n_ranks, at.mailbox_bytes // 8), at.mailboxes)
                num_tokens = boxes[:, :, mailbox.NUM_TOKENS] >> np.uint64(32)
                wait.raise_if_failed(words, r.rank, self._timeout, num_tokens)
                r.words.fill(0, mailbox.STATUS, STATUS_BYTES)
                wait.raise_if_bad_ids(words, r.rank)
            except PeerTimeout as error:
                timeouts.append(error)
            except EPValueError as error:
                bad_ids.append(error)
        if timeouts:
            error = PeerTimeout("\n".join(map(str, timeouts)) + self.log.compared(self._timeout))
            self._fail("a kernel", error)
            raise error
        return bad_ids[0] if bad_ids else None

    def _fail(self, call, error):
        """Record that an error or an interruption ended this call half-way, and drop all plans."""
        self.turn.fail(call, error)
        self.changed()


def _without_rows(forms, num_rows):
    """Forms of all ranks' arrays without the number of rows; () for an array without its rank's num_rows."""
    n, found = len(forms) // len(num_rows), []
    for i, (shape, *more) in enumerate(forms):
        is_right = shape and shape[0] == num_rows[i // n]
        found.append((shape[1:], *more) if is_right else ())
    return tuple(found)
