"""What FusedCombine and HybridEPCombine have in common: the launch that sends rows back and sums them by token."""

from epmoe import device
from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, VECTOR
from epmoe.fused_a2a.launches import N_WORDS, at
from epmoe.fused_a2a.pool import align
from epmoe.host.arrays import seen
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import combine_kernel, windows

X, PROBS, CAPACITY, PLACES, OUT, OUT_PROBS = at(
    "x", "probs", "capacity", "places", "out", "out_probs"
)


class ReturnPlan:
    """Sums of rows of one form over what handles say, and of their probs.

    shape: RowsShape. name: of the rows, for messages. n_numbers: of a token in the second result. write_handle(words,
    buffer, loan): enters the handle's memory of a rank into the words of a launch.
    """

    def __init__(self, buffer, shape, name, hidden, dtype, num_tokens, n_numbers, num_sms):
        self.buffer, self.shape, self.name, self.num_sms = buffer, shape, name, num_sms
        self.num_tokens, self.room, has_probs = num_tokens, -1, shape.has_probs
        self.facts = dict(
            call="combine",
            hidden=hidden,
            dtype=str(dtype),
            has_probs=bool(has_probs),
            probs_a_token=n_numbers,
        )
        self.results = [
            Arrangement(
                "combine result",
                {"x": ((n, hidden), dtype), "probs": ((n if has_probs else 0, n_numbers), FP32)},
            )
            for n in num_tokens
        ]
        self.probs_at = [result.fields["probs"].offset for result in self.results]
        self.kernel = combine_kernel(shape)

    @staticmethod
    def seen(buffer, name, x, probs, handle):
        """([arrays of x, of probs], what decides how they are returned, but for the number of rows)."""
        if arguments.absent(probs):
            probs = None
        (xs, _), of_probs = arguments.look(buffer, name, x), (None,) * len(buffer.ranks)
        num_rows, forms = handle.num_rows, None
        if probs is not None:
            of_probs, _ = arguments.look(buffer, f"probs of {name}", probs)
            forms = arguments.of_rows(of_probs, num_rows)
        of_x = arguments.of_rows(xs, num_rows)
        return (xs, of_probs), (name, of_x, forms, tuple(handle.num_tokens))

    def remember(self, key, x, handle, capacity):
        """Calls like this one, without probs, of a process with one rank, may start at once: see `known`."""
        if x.host is None:
            key = (*key, x.form, tuple(handle.num_tokens), self.num_sms)
            self.buffer.plan(key, lambda: _Again(self, handle, capacity))

    @staticmethod
    def known(buffer, key, x, handle, num_sms):
        """The sums of such a call, launched, or None if there was none like it."""
        one = seen(x)
        if one is None or one.address % VECTOR:
            return None
        again = buffer.known((*key, one.form, tuple(handle.num_tokens), num_sms))
        return again and again.start(one, handle.loans[0])

    def start(self, xs, probs, handle, capacity):
        """Launch: sums of each rank, and those of probs or None; capacity: rows that a rank may get back."""
        buffer, shape, has_probs = self.buffer, self.shape, self.shape.has_probs
        probs_at = align(capacity * shape.row_bytes)
        if capacity > self.room:
            buffer.want_pool(
                self.facts,
                staging_bytes=probs_at + 4 * shape.n_meta * capacity * has_probs,
                flag_rows=capacity,
                window_bytes=windows.bytes_for(shape),
                **buffer.launches.window_bytes(shape),
            )
            self.room = capacity
        if not device.SIM:
            return self._start(xs, probs, handle, capacity, probs_at)
        with buffer.letting_go():
            return self._start(xs, probs, handle, capacity, probs_at)

    def _start(self, xs, probs, handle, capacity, probs_at):
        buffer, has_probs, place = self.buffer, self.shape.has_probs, self.buffer.placing.place
        loans, calls, staging_at = [], [], buffer.pool_layout.staging_at
        for i, r in enumerate(buffer.ranks):
            loan, n, words = (
                buffer.lend(r.arena, self.results[i]),
                self.num_tokens[i],
                [0] * N_WORDS,
            )
            self.write_handle(words, buffer, handle.loans[i])
            words[X], words[CAPACITY] = place(r.rank, self.name, xs[i]), capacity
            words[PLACES], words[PLACES + 2] = staging_at, staging_at + probs_at
            if has_probs:
                words[PROBS] = place(r.rank, f"probs of {self.name}", probs[i])
            words[OUT], words[OUT_PROBS] = loan.base, loan.base + self.probs_at[i]
            loans.append(loan)
            calls.append((r.rank, words, n, n + handle.num_rows[i]))
        buffer.launch_all(self.kernel, calls, self.num_sms)
        sums = [loan.array("x") for loan in loans]
        return sums, [loan.array("probs") for loan in loans] if has_probs else None


class _Again:
    """What a combine without probs does once more, where a process has one rank, with rows in GPU memory."""

    def __init__(self, plan, handle, capacity):
        buffer, (n,) = plan.buffer, plan.num_tokens
        self.plan, self.buffer, self.facts, (self.r,) = plan, buffer, plan.facts, buffer.ranks
        (self.result,), self.write_handle = plan.results, plan.write_handle
        self.words, at = [0] * N_WORDS, buffer.pool_layout.staging_at
        self.words[CAPACITY], self.words[PLACES] = capacity, at
        self.words[PLACES + 2] = at + align(capacity * plan.shape.row_bytes)
        self.out_probs, n_rows = plan.probs_at[0], n + handle.num_rows[0]
        self.launch = buffer.find(plan.kernel, self.r.rank, n, None, plan.num_sms, n_rows)

    def start(self, x, of_handle):
        """As ReturnPlan.start."""
        arena, buffer, words = self.r.arena, self.buffer, self.words[:]
        loan = arena.lend(self.result)
        if buffer.is_captured:
            arena.captured.append(loan)
        self.write_handle(words, buffer, of_handle)
        words[X], words[OUT], words[OUT_PROBS] = x.address, loan.base, loan.base + self.out_probs
        self.launch.start(*words)
        buffer.kept = (x,)
        return loan.arrays(("x",)), None
