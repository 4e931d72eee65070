"""Buffer: the calls of the rows functions of one group, one after another; their plans, launches and errors."""

import struct
from threading import get_ident
from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.fused_a2a.arguments import PLAIN
from epmoe.fused_a2a.launches import Launches, at, fill
from epmoe.fused_a2a.memory import GroupMemory
from epmoe.host import inputs
from epmoe.host.placing import Placing
from epmoe.host.rounds import REFUSALS, Turn, in_short
from epmoe.kernels.rows import handle as written
from epmoe.kernels.rows import mailbox
from epmoe.kernels.rows import wait as rows_wait
from epmoe.kernels.rows.shape import parameter_block
from epmoe_ref.errors import EPError, EPStateError, EPValueError, PeerTimeout

MOST_PLANS = 1024
STATUS_BYTES = 64
ALL_WELL = bytes(STATUS_BYTES)
TOLD, TOLD_NUMBER = at("told"), at("told_number")


class Told(NamedTuple):
    """What a dispatch told the host of one rank; tokens_per_expert: int64 [L], the rest is numbers.

    tokens: of each rank. counts: rows from each rank [to each rank].
    """

    has_room: bool
    padded_rows: int
    tokens: list
    counts: list
    tokens_per_expert: np.ndarray


class Buffer(GroupMemory):
    """Memory and launches for the fused_a2a functions of one group.

    group: a world (LocalWorld, MPIWorld). hidden_bytes: of a row, as get_hidden_bytes tells; the rest is known when
    rows come. timeout [s]: after it a wait gives up and PeerTimeout is raised. launch: LaunchConfig.
    """

    def __init__(self, group, hidden_bytes=0, *, timeout=30.0, launch=None):
        timeout, stream = inputs.seconds("timeout", timeout), group.stream_of(group.ranks[0])
        self.hidden_bytes, self.capture = hidden_bytes, stream.capture
        self.placing = Placing(group.machine, lambda rank: self.world.stream_of(rank))
        # With all ranks in one process every rank's number of tokens is known before the launch.
        self.knows_all_ranks = self.world_has_lists = bool(group.lists)
        # launches begin one by one
        self.is_alone = not group.lists or device.SIM and len(group.ranks) == 1
        self.failure, self.failed_call, self.closed = None, "a kernel", False
        self.is_captured = False  # whether the call under way is, into a CUDA graph
        self.captured = []  # Loans that graphs write to at every replay
        self.fp8_dispatch = False  # HybridEPDispatch: send blockwise FP8
        self._info = struct.Struct(f"={written.TOKENS + group.n_ranks + group.n_ranks**2}i")
        self.turn, self._streams = Turn(), None
        super().__init__(group, Launches(group, launch), timeout)

    @property
    def timeout(self):
        """Seconds after which a wait gives up."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds):
        self._timeout = inputs.seconds("timeout", seconds)
        self.changed()

    # ------------------------------------------------------------------ calls
    def call(self, name, kind, names=(), arrays=(), options=(), of=None, interface=PLAIN):
        """run(kind, ...) as one call: whatever ends it but a refusal, also Ctrl-C, leaves it half-way."""
        turn = self.turn
        try:
            turn.free.pop()
        except IndexError:
            turn.refuse(name)
        turn.thread = get_ident()
        try:
            self.log.number += 1
            self.is_captured = self.capture() != 0
            try:
                return self.run(kind, names, arrays, options, of, interface)
            finally:
                if device.SIM:  # the simulator lets go of the caller's arrays
                    self.machine.synchronize()
                    self.placing.let_go()
        except REFUSALS:
            self.log.number -= 1
            raise
        except BaseException as error:
            if self.failure is None:
                self.failed_call, self.failure = name, error
            raise
        finally:
            turn.free[:] = (True,)

    def run(self, kind, names, arrays, options, of, interface=PLAIN):
        """A call by the plan for arrays like these, which is made if there is none: (results, handle or None).

        kind: the class of the plan, made by kind(buffer, names, arrays, options, of), or a function that is called
        instead. options: what else decides about it. of: the call's handle, or the group of a dispatch. results: this
        rank's, or a list over ranks of each, None instead of a list of what no rank has.
        """
        if not arrays:
            return kind()
        look, other = interface.peeks.get, interface.peek
        if not self.world_has_lists:
            seen = [look(type(a), other)(a, name) for a, name in zip(arrays, names)]
            given = (tuple(zip(*seen)),)  # forms, addresses, arrays
            forms = given[0][0]
        else:
            given = self._look_at_lists(names, arrays, look, other)
            forms = tuple([form for of_rank, _, _ in given for form in of_rank])
        if self.closed or self.failure is not None:
            self.expect_open()
        if kind.of_handle:
            if kind.rows_vary and of.is_exact:
                forms = _without_rows(forms, of.num_rows)
            forms = forms, of.form
        key = kind, options, forms
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            # of what was looked at: a look may have copied an array that kernels cannot read where it lies
            of_ranks = [list(array) for array in zip(*[seen for _, _, seen in given])]
            if not self.world_has_lists:
                of_ranks = [array for (array,) in of_ranks]
            plan = kind(self, names, of_ranks, options, of)
            self._plans[key] = plan  # the plan's own growing of memory has cleared them
        log = self.log
        log.recent.append((log.number, plan.facts))
        made, handle = plan.start(given, of, interface)
        if not self.world_has_lists:
            return made[0], handle
        columns = map(list, zip(*made))
        return [None if all(a is None for a in column) else column for column in columns], handle

    def _look_at_lists(self, names, arrays, look, other):
        for name, of_ranks in zip(names, arrays):
            if type(of_ranks) is not list or len(of_ranks) != len(self.ranks):
                inputs.ranks_of(self.world, name, of_ranks)
        given = []
        for r, of_rank in zip(self.ranks, zip(*arrays)):
            named = [(a, f"{name} of rank {r.rank}") for a, name in zip(of_rank, names)]
            given.append(tuple(zip(*[look(type(a), other)(a, what) for a, what in named])))
        return given

    def expect_open(self):
        """Raise EPStateError after close, or after an error that left the words in the middle of a call."""
        if self.closed:
            raise EPStateError("this Buffer is closed: get_buffer makes a new one")
        if self.failure is not None:
            raise EPStateError(
                f"{self.failed_call} was ended by {in_short(self.failure)}, so flags and words are in "
                "the middle of a call: call reset() of the Buffer on all ranks first"
            )

    def refuse_capture(self, call, remedy):
        """Raise EPStateError: a call whose results the host waits for is captured into a CUDA graph."""
        raise EPStateError(
            f"{call} waits for its number of rows, and the stream is being captured into a CUDA graph, "
            f"so nothing runs yet: {remedy}"
        )

    def reset(self):
        """After an error: words and flags as before the first call. Collective; handles and results stay good."""
        self.call("reset", self.put_back)
        self.failure = None

    def close(self, *, collective=True):
        """Free everything, but memory of results in use: that follows when nobody holds them. Collective by default."""
        if self.closed:
            return
        self.closed = True
        self.changed()
        self.machine.synchronize()
        together = collective and self.failure is None
        if together:
            self.world.barrier("leaving", self._timeout)
        self.captured.clear()
        self.launches.close()
        self.placing.close()
        self.free(together)

    # ------------------------------------------------------------------ launches
    def find(self, kernel, rank, num_tokens, grid):
        """A launch of a kernel of a rank; its words begin with what every launch of the rank is given."""
        r = self.ranks[list(self.world.ranks).index(rank)]
        pool = [0] * self.n_ranks if self._pool is None else list(self._pool.addresses)
        if self._streams is None:
            with self.world.launching(True) as streams:
                self._streams = streams
        of_ranks = dict(control_ptrs=list(self._control.addresses), pool_ptrs=pool)
        words = [0] * parameter_block(self.n_ranks).n_words
        values = dict(
            context=self.launches.context(rank, of_ranks),
            mailboxes_at=self.layout.mailboxes,
            mailbox_bytes=self.layout.mailbox_bytes,
            words=r.words.address,
            timeout_ns=max(1, int(self._timeout * 1e9)),
            columns=r.scratch.address,
            lamport_at=self.pool_layout.lamport_at,
            lamport_bytes=self.pool_layout.lamport_bytes,
        )
        fill(words, values)
        return self.launches.prepare(kernel, rank, num_tokens, self._streams[rank], words, grid)

    def start(self, launches):
        """Start one launch of each rank of this process. In the simulator they have ended when this returns."""
        self._launch(launches)
        if device.SIM:
            self.check()

    def _launch(self, launches):
        """Nothing between them may wait for the GPU: some ranks' kernels would begin, and wait for the others'."""
        if self.is_alone:
            for launch in launches:
                launch.start()
        else:
            with self.world.launching(True):
                for launch in launches:
                    launch.start()

    def start_and_hear(self, launches, n_local_experts):
        """Start dispatches, and wait until they have told the host their counts: see told()."""
        number, addresses = self.host_words.begin()
        for launch, address in zip(launches, addresses):
            launch.words[TOLD], launch.words[TOLD_NUMBER] = address, number
        self._launch(launches)
        return self.told(n_local_experts)

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
        if max(told[0].tokens) > self.max_tokens:
            self.want_tokens(max(told[0].tokens))
        return told

    def _heard(self, raw, n_local_experts):
        n, status = self.n_ranks, 4 * written.TOLD_STATUS
        has_room, padded_rows, *more = self._info.unpack_from(raw, status + 8 * n_local_experts)
        counts = [more[i : i + n] for i in range(n, n + n * n, n)]
        per_expert = np.frombuffer(raw, np.int64, n_local_experts, status)
        return Told(bool(has_room), padded_rows, more[:n], counts, per_expert)

    # ------------------------------------------------------------------ errors
    def check(self):
        """Wait for the kernels; raise PeerTimeout if a wait expired, EPValueError if ids in device memory were bad."""
        words = (np.int32, (STATUS_BYTES // 4,), mailbox.STATUS)
        self._raise_what_failed([r.words.read(*words) for r in self.ranks])

    def _raise_what_failed(self, status):
        timeouts, bad_ids = [], []
        for r, words in zip(self.ranks, status):
            if not any(words.tolist()):  # few words, which NumPy takes longer for
                continue
            at, control = self.layout, self._control.buffers[r.rank]
            try:
                boxes = control.read(
                    np.uint64, (2, self.n_ranks, at.mailbox_bytes // 8), at.mailboxes
                )
                num_tokens = boxes[:, :, mailbox.NUM_TOKENS] >> np.uint64(32)
                rows_wait.raise_if_failed(words, r.rank, self._timeout, num_tokens)
                r.words.fill(0, mailbox.STATUS, STATUS_BYTES)
                rows_wait.raise_if_bad_ids(words, r.rank)
            except PeerTimeout as error:
                timeouts.append(error)
            except EPValueError as error:
                bad_ids.append(error)
        if timeouts:
            said = "\n".join(map(str, timeouts)) + self.log.compared(self._timeout)
            self.failure = PeerTimeout(said)
            raise self.failure
        if bad_ids:
            raise bad_ids[0]


def _without_rows(forms, num_rows):
    """Forms of all ranks' matrices without their numbers of rows; () of one that has not num_rows of its rank."""
    n_arrays = len(forms) // len(num_rows)
    return tuple(
        [
            (f[0][1:], *f[1:]) if f[0][:1] == (num_rows[i // n_arrays],) else ()
            for i, f in enumerate(forms)
        ]
    )
