"""Plans: what follows from shapes, types and options of a call alone, made once. What plans of rows and by expert share.

Buffer.run finds a call's plan, or makes it, with all checks and all growing of memory. Its start() borrows memory, enters
addresses, and launches.
"""

from functools import lru_cache

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, NAMES
from epmoe.fused_a2a.launches import FIRST_OF_CALL, at, fill
from epmoe.fused_a2a.memory import align
from epmoe.host.arrays import Field
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import combine_kernel
from epmoe.kernels.rows.handle import TOKENS

MOST_ARRANGED = 256  # numbers of rows of one kind of result
CAPACITY, PLACES = at("capacity"), at("places")
NOTHING = (), (), ()  # is given: no forms, addresses and arrays
NO_ROOM = 0xFFFFFFFF  # a capacity: not even for zero rows, so that all ranks grow


class RankCall:
    """One rank's part of calls that are alike: what launches a kernel, and the memory that each call borrows.

    n_rows: rows that the kernel moves, None if each call says. values: {field: value} of the words that stay the same.
    lent: Arrangements of what a call borrows of the rank's own memory; arrays have the names of their words. dtypes: {name:
    type that it must have} of arrays that are given.
    """

    __slots__ = ("buffer", "r", "_lent", "_how", "_values", "_launches", "_latest", "_given")

    def __init__(self, plan, i, kernel, n_rows=None, values=None, lent=(), dtypes=None):
        self.buffer, self.r = plan.buffer, plan.buffer.ranks[i]
        self._lent = [(arrangement, places(arrangement)) for arrangement in lent]
        self._how, self._values = (kernel, plan.num_tokens[i], plan.num_sms), values or {}
        self._given = plan.TAKES, plan.names, dtypes
        self._launches, self._latest = {}, (None, None)  # by grid; number of rows, launch
        if n_rows is not None:
            self._latest = None, self._for(n_rows)

    def _for(self, n_rows):
        kernel, num_tokens, num_sms = self._how
        grid = self.buffer.launches.grid(num_sms, n_rows)
        launch = self._launches.get(grid)
        if launch is None:
            launch = self.buffer.find(kernel, self.r.rank, num_tokens, grid)
            fill(launch.words, self._values)
            self._launches[grid] = launch
        self._latest = n_rows, launch
        return launch

    def begin(self, given=NOTHING, memory=(), n_rows=None, more=None):
        """(what is to be started, the Loans of what it borrows).

        given: forms, addresses or None, and arrays. memory: (Loan, places) of what earlier calls borrowed. more:
        (Arrangement, places) of what this call alone borrows.
        """
        known, launch = self._latest
        if known != n_rows:
            launch = self._for(n_rows)
        words, loans, (takes, names, dtypes) = launch.words, [], self._given
        _, addresses, arrays = given
        if dtypes is not None or None in addresses:
            addresses = self.buffer.placing.place_all(self.r.rank, names, arrays, dtypes or {})
        for i, address in zip(takes, addresses):
            words[i] = address
        for loan, at_words in memory:
            base = loan.base
            for i, offset in at_words:
                words[i] = base + offset
        arena = self.r.arena
        for arrangement, at_words in self._lent if more is None else (*self._lent, more):
            loan = arena.lend(arrangement)
            base = loan.base
            for i, offset in at_words:
                words[i] = base + offset
            loans.append(loan)
        if self.buffer.is_captured:
            self.buffer.captured += loans
        return launch, loans

    def begin_like(self, earlier):
        """The same of a kernel that goes on with what another launch was given."""
        _, launch = self._latest
        launch.words[FIRST_OF_CALL:] = earlier.words[FIRST_OF_CALL:]
        fill(launch.words, self._values)
        return self.begin()


class Plan:
    """Calls that are alike. facts: what all ranks give alike, see CallLog; names: of the arrays, for messages.

    of_handle: whether a handle decides about it, besides the forms of arrays and options. rows_vary: whether the number
    of rows is another in each call with an exact handle. TAKES: the words for the arrays.
    """

    of_handle, rows_vary = True, False

    def __init__(self, buffer, names, num_tokens, num_sms, **facts):
        self.buffer, self.names, self.facts = buffer, names, facts
        self.num_tokens, self.num_sms = num_tokens, num_sms

    def rank_calls(self, kernel, **of_ranks):
        """The RankCall of each rank here. of_ranks: {name: for each rank}, of what RankCall takes."""
        of_each = [dict(zip(of_ranks, values)) for values in zip(*of_ranks.values())]
        return [RankCall(self, i, kernel, **more) for i, more in enumerate(of_each)]


class CombinePlan(Plan):
    """Sums of rows x over what handles say, and of their probs, put back slot by slot. options: num_sms.

    The handle holds what differs between rows and experts' rows: summed, the types of x; sums, what Launches.shape() is
    told of the kernel; probs_a_row, the K of probs [rows, K], or 0 if they are [rows].
    """

    rows_vary = True
    TAKES = at("x"), at("probs")

    def __init__(self, buffer, names, arrays, options, handle):
        (x, *probs), (num_sms,), num_rows = arrays, options, handle.num_rows
        xs = arguments.hidden_rows(buffer, names[0], x, dtypes=handle.summed, n_rows=num_rows)
        (_, hidden), dtype, has_probs = xs[0].shape, xs[0].dtype, bool(probs)
        for of_ranks in probs:
            of_probs = dict(n_rows=num_rows, n_columns=handle.probs_a_row)
            arguments.matrices(buffer, names[1], of_ranks, dtypes=(FP32,), **of_probs)
        self.shape = shape = buffer.launches.shape(
            row_bytes=hidden * dtype.itemsize,
            num_sms=num_sms,
            combine=handle.num_tokens,
            has_probs=has_probs,
            dtype=NAMES[dtype],
            **handle.sums,
        )
        n_probs, self.room = shape.top_k or shape.num_experts, -1
        facts = dict(call="combine", hidden=hidden, dtype=str(dtype), has_probs=has_probs)
        super().__init__(buffer, names, handle.num_tokens, num_sms, **facts, probs_a_token=n_probs)
        of_row = {"out": ((hidden,), dtype)} | ({"out_probs": ((n_probs,), FP32)} if probs else {})
        self.of = arranged("combine result", of_row)

    def _want_room(self, capacity):
        buffer, shape, self.room = self.buffer, self.shape, capacity
        nbytes = align(capacity * shape.row_bytes) + 4 * shape.n_meta * capacity * shape.has_probs
        buffer.want_pool(self.facts, dict(staging_bytes=nbytes, flag_rows=capacity), shape)
        self.staging_at = buffer.pool_layout.staging_at
        values = [{"places": self.staging_at}] * len(self.num_tokens)
        lent = [[self.of(n)[0]] for n in self.num_tokens]
        self.calls = self.rank_calls(combine_kernel(shape), values=values, lent=lent)

    def start(self, given, handle, interface):
        """Launch: sums of rows, and sums of probs or None."""
        capacity, results, launches, loans = handle.most_returned, interface.results, [], []
        if capacity > self.room:
            self._want_room(capacity)
        has_probs = self.shape.has_probs
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
        nothing = () if has_probs else (None,)
        return [(*results(loan, loan.fields.values()), *nothing) for loan in loans], None


def places(arrangement, word_of=at, names=None):
    """Where arrays lie, for `RankCall.begin`: [(index of a word, offset)]; names: of which arrays, None: of all.

    word_of: tells the word of an array by its name.
    """
    return [
        (word_of(name), field.offset)
        for name, field in arrangement.fields.items()
        if names is None or name in names
    ]


def arranged(name, of_row, word_of=at):
    """A function of a number of rows: (the Arrangement of so many, places); those of the latest numbers are kept.

    of_row: {array: (shape of a row, dtype)}.
    """

    @lru_cache(MOST_ARRANGED)
    def of(rows):
        made = Arrangement(name, {array: ((rows, *row), t) for array, (row, t) in of_row.items()})
        return made, places(made, word_of)

    return of


def handle_memory(name, n_ranks, arrays):
    """The Arrangement of a handle's memory: `info`, what a dispatch tells the host, and {name: (shape, dtype)}.

    `counts` [R, R] are the last words of `info`: kernels find each rank's tokens before them.
    """
    n_words = TOKENS + n_ranks
    made = Arrangement(name, {"info": ((n_words + n_ranks * n_ranks,), np.int32)} | arrays)
    made.fields["counts"] = Field((n_ranks, n_ranks), np.int32, 4 * n_words)
    return made
