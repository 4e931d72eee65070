"""What FusedCombine and HybridEPCombine have in common: the launch that sends rows back and sums them by token."""

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.launches import RankCall, at, borrowed
from epmoe.fused_a2a.pool import align
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import combine_kernel

X, PROBS, CAPACITY, PLACES = map(at, ("x", "probs", "capacity", "places"))
MADE = {"out": "x", "out_probs": "probs"}


class ReturnPlan:
    """Sums of rows of one form over what handles say, and of their probs.

    shape: RowsShape. names: of the rows and of their probs, for messages. n_numbers: of a token in the second result.
    """

    def __init__(self, buffer, shape, names, hidden, dtype, num_tokens, n_numbers, num_sms):
        self.buffer, self.shape, self.num_sms = buffer, shape, num_sms
        (self.name, self.probs_name), has_probs = names, shape.has_probs
        self.num_tokens, self.room = num_tokens, -1
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

    @staticmethod
    def decides(buffer, forms, handle):
        """What a plan is found by, besides options; an exact handle's number of rows is another in each call."""
        if not handle.is_exact:
            return *forms, handle.form, handle.capacity
        num_rows = handle.num_rows
        forms = [f and arguments.without_rows(f, num_rows, buffer) for f in forms]
        return *forms, handle.form

    def _want_room(self, capacity):
        buffer, shape, self.room = self.buffer, self.shape, capacity
        of_rows, of_probs = align(capacity * shape.row_bytes), 4 * shape.n_meta * capacity
        buffer.want_pool(
            self.facts,
            staging_bytes=of_rows + of_probs * shape.has_probs,
            flag_rows=capacity,
            **buffer.launches.window_bytes(shape),
        )
        kernel, self.staging_at = combine_kernel(shape), buffer.pool_layout.staging_at
        self.calls = [
            RankCall(buffer, r, kernel, n, self.num_sms, None, {}, [(result, MADE)])
            for r, n, result in zip(buffer.ranks, self.num_tokens, self.results)
        ]

    def start(self, given, handle):
        """Launch: sums of each rank, and sums of probs or None."""
        buffer, capacity = self.buffer, handle.most_returned
        if capacity > self.room:
            self._want_room(capacity)
        has_probs, staging_at = self.shape.has_probs, self.staging_at
        loans, launches = [], []
        for r, call, n, n_rows, memory, ((x_at, probs_at), (x, probs)) in zip(
            buffer.ranks, self.calls, self.num_tokens, handle.num_rows, handle.memory, given
        ):
            launch, (loan,) = call.begin(n + n_rows)
            words = launch.words
            borrowed(words, memory)
            words[X], words[CAPACITY] = x_at or buffer.placing.place(r.rank, self.name, x), capacity
            words[PLACES] = staging_at
            if has_probs:
                words[PLACES + 2] = staging_at + align(capacity * self.shape.row_bytes)
                words[PROBS] = probs_at or buffer.placing.place(r.rank, self.probs_name, probs)
            loans.append(loan)
            launches.append(launch)
        buffer.start(launches)
        buffer.kept = given
        sums = [loan.array("x") for loan in loans]
        return sums, [loan.array("probs") for loan in loans] if has_probs else None
