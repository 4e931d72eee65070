"""What FusedCombine and HybridEPCombine have in common: the launch that sends rows back and sums them by token."""

from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.launches import RankCall, at
from epmoe.fused_a2a.pool import align
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import combine_kernel

TAKES = at("x"), at("probs")
CAPACITY, PLACES = at("capacity"), at("places")
MADE = {"out": "x", "out_probs": "probs"}


class ReturnPlan:
    """Sums of rows of one form over what handles say, and of their probs.

    of_handle, rows_vary: a handle decides about it; an exact handle's number of rows is another in each call.
    shape: RowsShape. names: of the rows and of their probs, for messages. n_numbers: of a token in the second result.
    """

    of_handle = rows_vary = True

    def __init__(self, buffer, shape, names, hidden, dtype, num_tokens, n_numbers, num_sms):
        self.buffer, self.shape, self.num_sms, self.names = buffer, shape, num_sms, names
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
        given, at = dict(takes=TAKES, names=self.names), {"places": [self.staging_at]}
        self.calls = [
            RankCall(buffer, r, kernel, n, self.num_sms, None, at, lent=[(result, MADE)], **given)
            for r, n, result in zip(buffer.ranks, self.num_tokens, self.results)
        ]

    def start(self, given, handle, interface):
        """Launch: of each rank sums of rows, and sums of probs or None."""
        capacity, result = handle.most_returned, interface.result
        if capacity > self.room:
            self._want_room(capacity)
        has_probs, loans, launches = self.shape.has_probs, [], []
        for call, n, n_rows, memory, arrays in zip(
            self.calls, self.num_tokens, handle.num_rows, handle.memory, given
        ):
            launch, (loan,) = call.begin(arrays, memory, n + n_rows)
            launch.words[CAPACITY] = capacity
            if has_probs:
                of_rows = align(capacity * self.shape.row_bytes)
                launch.words[PLACES + 2] = self.staging_at + of_rows
            loans.append(loan)
            launches.append(launch)
        self.buffer.start(launches)
        return [
            (
                result(loan, loan.fields["x"]),
                result(loan, loan.fields["probs"]) if has_probs else None,
            )
            for loan in loans
        ]
