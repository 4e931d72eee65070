"""A plan holds all that follows from a call's shapes, types and options, made once. The base of rows and hybrid plans.

Buffer.call finds a call's plan or makes it. Making it does all checks, and usually grows memory. run() then runs the
call of one rank: it borrows memory, fills in launches, and makes the results.
"""

from functools import lru_cache
from operator import attrgetter

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, NAMES
from epmoe.fused_a2a.buffer import PLAIN
from epmoe.fused_a2a.launches import RankCall, at
from epmoe.host.arrays import Field
from epmoe.host.memory_pool import Arrangement, align
from epmoe.kernels.rows import combine_kernel
from epmoe.kernels.rows.handle import TOKENS
from epmoe_ref.errors import EPValueError

MOST_ARRANGED = 256  # Arrangements kept for one kind of result, by number of rows
PLACES, X, PROBS = map(at, ("places", "x", "probs"))
TOLD, TOLD_NUMBER = map(at, ("told", "told_number"))


class Handle:
    """The routing of a dispatch, for any number of combines and cached dispatches.

    plan: the dispatch's. loans: for each rank a Loan, the memory of the routing; kernels of later calls get the
    addresses of its arrays. form: part of the key of later plans; sums: see CombinePlan. num_tokens, num_rows: T and
    the rows of each rank of this process; num_rows is None until the host knows them. capacity: the most rows that a
    rank can have received, unexpanded, and can get back; the same on all ranks.
    DISPATCH, COMBINE: names of calls. GRADIENT: names of the gradients' arrays. CACHED: plan class of combine's
    gradient, a cached dispatch. num_sms: SMs that (calls that dispatch, calls that combine) may use; None: all.
    buffer_of(group): finds or makes the Buffer of a group, if the dispatch's was closed.
    """

    __slots__ = "plan buffer loans group num_rows capacity __weakref__".split()
    DISPATCH, COMBINE, GRADIENT, CACHED, num_sms, buffer_of = "", "", (), None, (None, None), None

    def __init__(self, plan, group):
        self.plan, self.buffer, self.group = plan, plan.buffer, group
        self.loans, self.num_rows, self.capacity = [], plan.num_rows, plan.capacity

    def know(self, num_rows):
        """Take the numbers of rows, which the host has been told, and the capacity that follows from all tokens."""
        self.num_rows, self.capacity = num_rows, self.buffer.n_ranks * self.buffer.max_tokens

    @classmethod
    def refuse(cls, handle):
        """Raise EPValueError: another dispatch, or none, made the handle."""
        raise EPValueError(f"handle is a {type(handle).__name__}; the handle that {cls.DISPATCH} returned is needed")

    def __copy__(self, memo=None):
        """The handle itself: calls never change it."""
        return self

    __deepcopy__ = __copy__

    def __reduce__(self):
        raise TypeError(
            f"{type(self).__name__} is the routing of one {self.DISPATCH}, in memory of this process, and cannot be "
            "pickled: keep token_indices or routing_map instead, and dispatch again where the handle is needed"
        )

    def combined(self, x, interface=PLAIN):
        """The sum of the rows x by token."""
        return self.buffer.call(self.COMBINE, CombinePlan, ("x",), (x,), self.num_sms[1:], self, interface)[0][0]

    def dispatch_gradients(self, grad_x, grad_probs, interface=PLAIN):
        """Gradients of the tokens and of probs (or None), from those of the rows."""
        given = (grad_x,) if arguments.absent(grad_probs) else (grad_x, grad_probs)
        name, num_sms = f"the gradient of {self.DISPATCH}", self.num_sms[1:]
        return self.buffer.call(name, CombinePlan, self.GRADIENT, given, num_sms, self, interface)[0]

    def combine_gradient(self, grad_x, interface=PLAIN):
        """Gradients of the rows, from those of the tokens."""
        name, num_sms = f"the gradient of {self.COMBINE}", self.num_sms[:1]
        return self.buffer.call(name, self.CACHED, self.GRADIENT[:1], (grad_x,), num_sms, self, interface)[0][0]

    form = property(attrgetter("plan.form", "capacity"))
    num_tokens, sums = property(attrgetter("plan.num_tokens")), property(attrgetter("plan.sums"))


class Plan:
    """The prepared launches for calls of one form: equal shapes, types and options.

    It is made from the arguments of Buffer.call; arrays: for each name a list over the ranks here. x: the checked rows,
    with `hidden` elements of a `dtype`. call: its name. facts: what must be equal on all ranks, since messages and room
    follow from it, see CallLog. names: of the arrays, for messages. makes: a dispatch's class of handles; None for
    calls of a handle, whose form is part of the key.
    rows_vary: whether the number of rows differs between calls with an exact handle. dtypes: {name: type it must have}
    if arrays must be placed; None if kernels read them in place. is_exact: whether the call is a dispatch in which the host
    waits for the numbers of rows, so that arrays have as many rows as came, not room for the most. remedy: what to call
    instead of it during graph capture. check_values: checks the values of arrays in host memory before each call in the
    simulator; on a GPU kernels do. num_rows, capacity: of a dispatch's handle; num_rows is None if is_exact.

    run(i, addresses, handle, made) is a generator that runs the call of the i-th rank here. It yields (launch, the
    Loans that a CUDA graph with it must keep, () if it cannot be captured) and goes on when the launches of all ranks
    have started. made[i]: gets the results, a tuple. handle: the given one, or the one that a dispatch makes: then
    run() adds the rank's Loans, and counts rows.
    """

    makes = check_values = num_rows = None
    rows_vary = False

    def __init__(self, buffer, call, interface, names, num_tokens, num_sms, x, is_exact=False, **facts):
        self.buffer, self.interface, self.names, self.is_exact = buffer, interface, names, is_exact
        self.dtypes = None
        self.num_tokens, self.num_sms, self.hidden, self.dtype = num_tokens, num_sms, x[0].shape[1], x[0].dtype
        self.facts = dict(call=call, hidden=self.hidden, dtype=str(self.dtype)) | facts
        many = buffer.launches.tuning.many_blocks
        self.facts[f"at least {many} SMs"] = buffer.launches.blocks(num_sms) >= many
        buffer.log.agree(self.facts, buffer.timeout)

    def rank_calls(self, kernel, values):
        """A RankCall for each rank here. values: {field: value} for each rank."""
        return [RankCall(self, i, kernel, of_rank) for i, of_rank in enumerate(values)]

    def results_of(self, fields):
        """A function that turns a Loan into results, one for each of these fields."""
        return self.interface.results_of(fields, self.buffer.machine)

    def arranged(self, name, of_row, word_of=at):
        """A function of a number of rows that returns (Arrangement, results_of its fields), cached.

        of_row: {array: (shape of a row, dtype)}.
        """
        words = {array: word_of(array) for array in of_row}

        @lru_cache(MOST_ARRANGED)
        def of(rows):
            arrays = {array: ((rows, *row), dtype) for array, (row, dtype) in of_row.items()}
            made = Arrangement(name, arrays, words=words)
            return made, self.results_of(made.fields.values())

        return of


class CombinePlan(Plan):
    """A plan that sums rows x by token as the handle says, and sums probs or puts them in place. options: num_sms.

    The handle says how rows and rows by expert differ: summed, the dtypes allowed for x; sums, arguments of
    Launches.shape(); probs_a_row, the K of probs [rows, K], or 0 if they are [rows].
    """

    rows_vary = True

    def __init__(self, buffer, call, interface, names, arrays, options, handle):
        (x, *probs), (num_sms,), num_rows, capacity = arrays, options, handle.num_rows, handle.capacity
        n_of = dict(n_rows=num_rows, rows_of="the rows that the dispatch returned")
        xs = arguments.matrices(buffer, names[0], x, dtypes=handle.summed, vectors=True, **n_of)
        self.has_probs = has_probs = bool(probs)
        for of_ranks in probs:
            n_columns = handle.probs_a_row
            arguments.matrices(buffer, names[1], of_ranks, dtypes=(FP32,), n_columns=n_columns, **n_of)
        row_bytes, dtype = xs[0].shape[1] * xs[0].dtype.itemsize, NAMES[xs[0].dtype]
        of_kernel = dict(dtype=dtype, has_probs=has_probs, combine=handle.num_tokens, num_sms=num_sms)
        shape = buffer.launches.shape(row_bytes=row_bytes, **of_kernel, **handle.sums)
        n_probs = shape.top_k or shape.num_experts
        facts = dict(has_probs=has_probs, probs_a_token=n_probs)
        super().__init__(buffer, call, interface, names, handle.num_tokens, num_sms, xs, **facts)
        of_row = {"out": ((self.hidden,), self.dtype)} | ({"out_probs": ((n_probs,), FP32)} if probs else {})
        of = self.arranged("combine result", of_row)
        self.outs = [of(n) for n in self.num_tokens]
        probs_at = align(capacity * shape.row_bytes)
        nbytes = probs_at + 4 * shape.n_meta * capacity * has_probs
        buffer.make_room(call, shape=shape, staging_bytes=nbytes, flag_rows=capacity)
        staging_at = buffer.pool_layout.staging_at
        values = dict(places=[staging_at, 0, staging_at + probs_at, 0], capacity=capacity)
        self.calls = self.rank_calls(combine_kernel(shape), [values] * len(self.num_tokens))

    def run(self, i, addresses, handle, made):
        """See Plan. Results: sums of rows, probs of tokens or None."""
        call, (out, results) = self.calls[i], self.outs[i]
        launch = call[min(self.num_tokens[i] + handle.num_rows[i] + 1, call.most)]
        words, loan = launch.words, call.r.arena.lend(out)
        words[X] = addresses[0]
        if self.has_probs:
            words[PROBS] = addresses[1]
        for at_words, run in (*handle.loans[i].piece.words, *loan.piece.words):
            words[at_words] = run
        yield launch, loan
        made[i] = results(loan) if self.has_probs else (*results(loan), None)


def handle_memory(name, n_ranks, arrays):
    """The Arrangement of a handle's memory: `info`, which the host is told too, and arrays {name: (shape, dtype)}.

    `counts` [R, R] are the last words of `info`, after each rank's number of tokens.
    """
    n_words = TOKENS + n_ranks
    arrays = {"info": ((n_words + n_ranks * n_ranks,), np.int32)} | arrays
    words = {one: at(one) for one in (*arrays, "counts")}
    made = Arrangement(name, arrays, words=words)
    made.fields["counts"] = Field((n_ranks, n_ranks), np.int32, 4 * n_words)
    return made
