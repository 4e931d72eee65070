"""FusedDispatch and FusedCombine on a Buffer: a token travels once to a rank, however many of its experts are there.

What follows from shapes, types and options alone is a plan, one class for each function. Buffer.run finds a call's plan,
or makes it, with all checks and all growing of memory. Its start() borrows memory, enters addresses, and launches.
"""

from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.expanding import NO_ROOM
from epmoe.fused_a2a.launches import RankCall, arranged, at, fill, handle_memory, places
from epmoe.fused_a2a.returning import ReturnPlan
from epmoe.kernels.rows import dispatch_kernel, move_kernel, resend_kernel
from epmoe.kernels.rows.few.lamport import blocks_for

TAKES = tuple(map(at, ("x", "ids", "probs", "scales")))
CAPACITY = at("capacity")
ARGUMENTS = "x", "token_indices", "token_probs", "scales"
RECEIVED = ("x", "ids", "probs", "scales")  # order of the arrays of a result in a note
WRITTEN = {name: name for name in ("info", "counts", "tokens_per_expert", "row_of")}
KEPT = {name: name for name in ("counts", "row_of")}  # what later calls read of a handle


class RowsRouting(NamedTuple):
    """What handles of dispatches of one form have in common; see RowsHandle."""

    ranks: list
    num_experts: int
    top_k: int
    num_tokens: list
    form: tuple  # what decides about plans of later calls


class RowsHandle:
    """The routing of one FusedDispatch.forward, for any number of combines and cached dispatches.

    It depends on ids and numbers of tokens alone: data of another hidden size or dtype may use it. ranks: of this
    process. num_tokens, num_rows: T and N of each of them. is_exact: whether N is known. counts: [R] lists [R], rows from
    each source to each rank; None where they are on the device alone, and then every rank has `capacity` rows, of which
    the first N count. memory: (Loan, places) of each rank, see RankCall.begin. most_rows, most_returned: the largest
    N of all ranks, and the most rows that a rank gets back in combine.
    """

    def __init__(self, routing, counts, memory, capacity, group):
        self.routing, self.counts, self.memory = routing, counts, memory
        self.capacity, self.group = capacity, group
        self.form, self.num_tokens = routing.form, routing.num_tokens
        self.most_rows = self.most_returned = capacity
        self.is_exact = counts is not None
        if not self.is_exact:
            self.num_rows = [capacity] * len(self.num_tokens)
        else:
            received = list(map(sum, zip(*counts)))
            self.num_rows = [received[rank] for rank in routing.ranks]
            self.most_rows, self.most_returned = max(received), max(map(sum, counts))

    ranks = property(lambda self: self.routing.ranks)
    num_experts = property(lambda self: self.routing.num_experts)
    top_k = property(lambda self: self.routing.top_k)

    @property
    def loans(self):
        """The memory of each rank."""
        return [loan for ((loan, _),) in self.memory]


class Receiving:
    """What is received: arrays of so many rows, in the pool's heap or, without room there, in the staging area."""

    def __init__(self, buffer, hidden, dtype, top_k=0, n_scales=0):
        self.buffer = buffer
        self.n_scales = n_scales

        def shapes(rows):
            arrays = {"x": ((rows, hidden), dtype)}
            if top_k:
                arrays |= {"ids": ((rows, top_k), np.int64), "probs": ((rows, top_k), FP32)}
            if n_scales:
                arrays["scales"] = ((rows, n_scales), FP32)
            return arrays

        self.names, first = [name for name in RECEIVED if name in shapes(0)], at("places")
        self.of = arranged(
            "rows result", shapes, {first + RECEIVED.index(n): n for n in self.names}
        )
        self._moves = {}

    def begin(self, r, launch, rows):
        """Tell a launch where a rank receives at most so many rows: a Loan of its heap, or None for the staging area."""
        buffer, words = self.buffer, launch.words
        arrangement, at_words = self.of(rows)
        loan = r.heap.lend(arrangement)
        words[CAPACITY] = rows
        if loan is not None:
            start = loan.start
            if buffer.is_captured:
                buffer.captured.append(loan)
        else:
            start = buffer.pool_layout.staging_at
            if arrangement.nbytes > buffer.pool_layout.staging_bytes:
                words[CAPACITY] = NO_ROOM
        for i, offset in at_words:
            words[i] = start + offset
        return loan

    def result(self, loan, rows, n, result):
        """What a rank gets of memory for so many rows, cut to n: (x or (x, scales), ids, probs); result: as of an Interface."""
        fields = loan.fields
        if n != rows:
            fields = {name: fields[name].first(n) for name in self.names}
        x = result(loan, fields["x"])
        if "ids" not in fields:
            return (x,)
        if self.n_scales:
            x = x, result(loan, fields["scales"])
        return x, result(loan, fields["ids"]), result(loan, fields["probs"])

    def moved(self, loans, rows, num_rows):
        """The loans, and of own memory where rows are in the staging area, from which they are moved there."""
        buffer, (staged, _), loans, launches = self.buffer, self.of(rows), list(loans), []
        kernel = move_kernel(buffer.launches.threads)
        more = [0] * (len(RECEIVED) - len(self.names))
        for i, (r, n) in enumerate(zip(buffer.ranks, num_rows)):
            if loans[i] is not None:
                continue
            arrangement, _ = self.of(n)
            loan = loans[i] = buffer.lend(r.arena, arrangement)
            if i not in self._moves:
                self._moves[i] = RankCall(buffer, r, kernel, 0, None, None, {})
            launch, _ = self._moves[i].begin((), n_rows=n)
            at_staging = buffer.staging(r)
            values = dict(
                sources=[at_staging + staged.fields[name].offset for name in self.names] + more,
                targets=[loan.address(name) for name in self.names] + more,
                word_counts=[loan.fields[name].nbytes // 4 for name in self.names] + more,
            )
            fill(launch.words, values)
            launches.append(launch)
        buffer.start(launches)
        return loans


class DispatchPlan:
    """Dispatches of these shapes. arrays: ARGUMENTS of FusedDispatch.forward, the last one only of FP8.

    options: num_experts, num_sms, on_device (as fused_dispatch_on_device says).
    """

    of_handle = False  # nothing but options and the forms of arrays decides what plan is found

    def __init__(self, buffer, names, arrays, options, group):
        x, token_indices, token_probs, *scales = arrays
        num_experts, self.num_sms, self.on_device = options
        self.buffer, n_ranks, on_device = buffer, buffer.n_ranks, self.on_device
        arguments.ranks_that_fit(n_ranks)
        self.local = local = arguments.experts_per_rank(num_experts, n_ranks)
        self.num_experts = local * n_ranks
        xs, scales = arguments.tokens(buffer, "x", x, *scales)
        self.num_tokens = num_tokens = [a.shape[0] for a in xs]
        ids = arguments.expert_indices(buffer, token_indices, num_tokens, self.num_experts)
        top_k, (_, hidden), dtype = ids[0].shape[1], xs[0].shape, xs[0].dtype
        arguments.matrices(
            buffer, "token_probs", token_probs, dtypes=(FP32,), n_rows=num_tokens, n_columns=top_k
        )
        arguments.distinct_ids(buffer, ids, self.num_experts)
        n_scales = scales[0].shape[1] if scales else 0
        self.facts = facts = dict(
            call="fused_dispatch",
            hidden=hidden,
            dtype=str(dtype),
            num_experts=self.num_experts,
            top_k=top_k,
            has_scales=bool(n_scales),
            on_device=on_device,
        )
        buffer.want_experts(local, facts)
        self.received = received = Receiving(buffer, hidden, dtype, top_k, n_scales)
        asks_for_results = buffer.knows_all_ranks or on_device
        if asks_for_results:
            # without a look at the device, a batch larger than any before is taken to be that large on all ranks
            buffer.want_tokens(max(num_tokens))
        wide = all(a.dtype.itemsize == 8 for a in ids)
        # the type in this machine's byte order, which kernels read; on a GPU they read most ids as they are
        types = [a.dtype.newbyteorder("=") if wide else np.dtype(np.int32) for a in ids]
        dtypes = [
            None if a.dtype == t and a.host is None else {"token_indices": t}
            for a, t in zip(ids, types)
        ]
        self.shape = buffer.launches.shape(
            local,
            hidden * dtype.itemsize,
            to_send=num_tokens,
            by_all=buffer.launches.are_all(self.num_sms),
            top_k=top_k,
            id_bytes=8 if wide else 4,
            scale_words=n_scales,
            has_probs=True,
            has_meta=True,
        )

        def needs(tokens):
            return dict(
                staging_bytes=0,
                result_bytes=received.of(n_ranks * tokens)[0].nbytes if asks_for_results else 0,
                **buffer.launches.window_bytes(self.shape),
            )

        buffer.want_pool_for_tokens(facts, needs)
        self.capacity = n_ranks * max(buffer.max_tokens, *num_tokens)
        form = top_k, *num_tokens, self.capacity if on_device else None
        self.routing = RowsRouting(
            list(buffer.world.ranks), self.num_experts, top_k, num_tokens, form
        )
        per_expert = {"tokens_per_expert": ((local,), np.int64)}
        of_handle = [
            handle_memory("rows handle", n_ranks, per_expert | {"row_of": ((n, n_ranks), np.int32)})
            for n in num_tokens
        ]
        self.per_expert = [arrangement.fields["tokens_per_expert"] for arrangement in of_handle]
        self.places = [places(arrangement, KEPT) for arrangement in of_handle]
        self.calls = self._calls(
            dispatch_kernel(self.shape),
            [
                dict(lent=[(a, WRITTEN)], takes=TAKES, names=names, dtypes=of_ids)
                for a, of_ids in zip(of_handle, dtypes)
            ],
        )
        if not on_device:
            buffer.prepare_to_be_told(local)

    def _calls(self, kernel, more):
        """The RankCalls of a kernel that sends; more: what each takes besides."""
        return [
            RankCall(
                self.buffer, r, kernel, n, self.num_sms, blocks_for(n, self.shape.lamport), {}, **of
            )
            for r, n, of in zip(self.buffer.ranks, self.num_tokens, more)
        ]

    def start(self, given, group, interface):
        """Launch: results of each rank (recv_x, recv_token_indices, recv_token_probs, tokens_per_expert), the handle."""
        buffer, rows, on_device, result = (
            self.buffer,
            self.capacity,
            self.on_device,
            interface.result,
        )
        receive, results = self.received.begin, self.received.result
        if not on_device:
            buffer.expect_no_capture("fused_dispatch", "call fused_dispatch_on_device")
        if device.SIM:
            arguments.distinct_ids(buffer, [ids for _, (_, _, ids), *_ in given], self.num_experts)
        launches, loans, memory, made = [], [], [], []
        for call, at_words, arrays in zip(self.calls, self.places, given):
            launch, (loan,) = call.begin(arrays)
            loans.append(receive(call.r, launch, rows))
            launches.append(launch)
            memory.append(((loan, at_words),))
        told = buffer.start(launches, None if on_device else self.local)
        if on_device:
            handle = RowsHandle(self.routing, None, memory, rows, group)
        else:
            counts, capacity = told[0].counts, buffer.n_ranks * buffer.max_tokens
            if not told[0].has_room:
                rows = capacity
                loans = self._sent_again(launches, rows)
            handle = RowsHandle(self.routing, counts, memory, capacity, group)
        if None in loans:
            loans = self.received.moved(loans, rows, handle.num_rows)
        for i, loan in enumerate(loans):
            if on_device:
                (kept, _), field = memory[i][0], self.per_expert[i]
                per_expert = result(kept, field)
            else:
                per_expert = interface.told(told[i].tokens_per_expert)
            made.append((*results(loan, rows, handle.num_rows[i], result), per_expert))
        return made, handle

    def _sent_again(self, launches, rows):
        """Loans of rows that are sent once more: every rank has seen the same counts, and comes to the same number here."""
        buffer = self.buffer
        room = self.received.of(rows)[0].nbytes
        buffer.want_pool(self.facts, staging_bytes=0, result_bytes=room)
        calls = self._calls(resend_kernel(self.shape), [{}] * len(launches))
        again = [call.begin_like(launch)[0] for call, launch in zip(calls, launches)]
        loans = [self.received.begin(r, a, rows) for r, a in zip(buffer.ranks, again)]
        buffer.start(again)
        return loans


class CachedPlan:
    """Cached dispatches: the rows of x [T, H] where an earlier dispatch sent its tokens. options: num_sms."""

    of_handle, rows_vary = True, False  # as of a ReturnPlan

    def __init__(self, buffer, names, arrays, options, handle):
        (x,), (num_sms,), num_tokens = arrays, options, handle.num_tokens
        self.buffer, self.names = buffer, names
        xs = arguments.hidden_rows(buffer, names[0], x, n_rows=num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        self.received, self.room = Receiving(buffer, hidden, dtype), -1
        self.shape = buffer.launches.shape(
            1,
            hidden * dtype.itemsize,
            to_send=num_tokens,
            top_k=1,
            by_all=buffer.launches.are_all(num_sms),
        )
        self.num_tokens, self.num_sms = num_tokens, num_sms
        self.facts = dict(call="the gradient of combine", hidden=hidden, dtype=str(dtype))

    def _want_room(self, rows):
        # Counts are known to all ranks, so all grow together; in the staging area there is then room on every rank.
        buffer, shape = self.buffer, self.shape
        buffer.want_pool(
            self.facts,
            staging_bytes=0,
            result_bytes=self.received.of(rows)[0].nbytes,
            **buffer.launches.window_bytes(shape),
        )
        kernel, self.room, given = resend_kernel(shape), rows, dict(takes=TAKES, names=self.names)
        self.calls = [
            RankCall(buffer, r, kernel, n, self.num_sms, blocks_for(n, shape.lamport), {}, **given)
            for r, n in zip(buffer.ranks, self.num_tokens)
        ]

    def start(self, given, handle, interface):
        """Launch: recv_x [N, H] of each rank, of x's dtype."""
        rows, launches, loans = handle.most_rows, [], []
        if rows > self.room:
            self._want_room(rows)
        for call, arrays, memory in zip(self.calls, given, handle.memory):
            launch, _ = call.begin(arrays, memory)
            loans.append(self.received.begin(call.r, launch, rows))
            launches.append(launch)
        self.buffer.start(launches)
        made, received = [], self.received
        if None in loans:
            loans = received.moved(loans, rows, handle.num_rows)
        for loan, n in zip(loans, handle.num_rows):
            made += received.result(loan, rows, n, interface.result)
        return made


class CombinePlan(ReturnPlan):
    """Sums over ranks of rows x [N, H], and slot by slot of probs [N, K]. options: num_sms."""

    def __init__(self, buffer, names, arrays, options, handle):
        (x, *probs), (num_sms,) = arrays, options
        xs = arguments.hidden_rows(
            buffer, names[0], x, dtypes=tuple(arguments.NAMES), n_rows=handle.num_rows
        )
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        if probs:
            arguments.matrices(
                buffer,
                names[1],
                *probs,
                dtypes=(FP32,),
                n_rows=handle.num_rows,
                n_columns=handle.top_k,
            )
        shape = buffer.launches.shape(
            1,
            hidden * dtype.itemsize,
            to_combine=handle.num_tokens,
            top_k=handle.top_k,
            by_all=buffer.launches.are_all(num_sms),
            has_probs=bool(probs),
            dtype=arguments.NAMES[dtype],
        )
        super().__init__(
            buffer, shape, names, hidden, dtype, handle.num_tokens, handle.top_k, num_sms
        )
