"""FusedDispatch on a Buffer: a token travels once to a rank, however many of its experts are there."""

import numpy as np

from epmoe import device
from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, NAMES
from epmoe.fused_a2a.launches import at, fill
from epmoe.fused_a2a.plans import CAPACITY, NO_ROOM, Plan, RankCall, arranged, handle_memory, places
from epmoe.host import inputs
from epmoe.kernels.rows import dispatch_kernel, move_kernel, resend_kernel
from epmoe.kernels.rows.few.lamport import blocks_for

ARGUMENTS = "x", "token_indices", "token_probs", "scales"
RECEIVED = ("x", "ids", "probs", "scales")  # order of the arrays of a result, as announced
PLACE_OF = {name: at("places") + i for i, name in enumerate(RECEIVED)}
KEPT = "counts", "row_of"  # what later calls read of a handle


class RowsHandle:
    """The routing of one FusedDispatch.forward, for any number of combines and cached dispatches.

    It depends on ids and numbers of tokens alone: data of another hidden size or dtype may use it. num_tokens, num_rows:
    T and N of each rank of this process. is_exact: whether N is known. counts: [R] lists [R], rows from each source to
    each rank; None where they are on the device alone, and then every rank has `capacity` rows, of which the first N
    count. memory: (Loan, places) of each rank, see RankCall.begin. most_rows, most_returned: the largest N of all ranks,
    and the most rows that a rank gets back in combine. form, summed, sums, probs_a_row: for plans of later calls.
    """

    summed = tuple(NAMES)

    def __init__(self, plan, counts, memory, capacity, group):
        self.counts, self.memory, self.capacity, self.group = counts, memory, capacity, group
        self.form, self.num_tokens, self.sums = plan.form, plan.num_tokens, plan.sums
        self.most_rows = self.most_returned = capacity
        self.is_exact = counts is not None
        if not self.is_exact:
            self.num_rows = [capacity] * len(self.num_tokens)
        else:
            received = list(map(sum, zip(*counts)))
            self.num_rows = [received[r.rank] for r in plan.buffer.ranks]
            self.most_rows, self.most_returned = max(received), max(map(sum, counts))

    probs_a_row = property(lambda self: self.sums["top_k"])

    @property
    def loans(self):
        """The memory of each rank."""
        return [loan for ((loan, _),) in self.memory]


class ReceivingPlan(Plan):
    """A plan of rows that peers write: into the pool's heap, or without room there into the staging area.

    TAKES: the words for the arrays of tokens, in the order of RECEIVED.
    """

    TAKES = tuple(map(at, RECEIVED))

    def expect_results(self, hidden, dtype, top_k=0, n_scales=0):
        """Prepare for rows of this kind: of(rows) tells their Arrangement and places."""
        of_row = {"x": ((hidden,), dtype)}
        if top_k:
            of_row |= {"ids": ((top_k,), np.int64), "probs": ((top_k,), FP32)}
        if n_scales:
            of_row["scales"] = (n_scales,), FP32
        self.of, self._moves = arranged("rows result", of_row, PLACE_OF.get), {}

    def sending(self, kernel, **of_ranks):
        """The RankCalls of a kernel that sends all tokens."""
        n_rows = [blocks_for(n, self.shape.lamport) for n in self.num_tokens]
        return self.rank_calls(kernel, n_rows=n_rows, **of_ranks)

    def make_room(self, r, launch, rows):
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

    def moved(self, loans, rows, num_rows):
        """The loans, and of own memory where rows are in the staging area, from which they are moved there."""
        buffer, (staged, _), loans, launches = self.buffer, self.of(rows), list(loans), []
        kernel = move_kernel(buffer.launches.threads)
        for i, (r, n) in enumerate(zip(buffer.ranks, num_rows)):
            if loans[i] is not None:
                continue
            if i not in self._moves:
                self._moves[i] = RankCall(self, i, kernel)
            launch, (loan,) = self._moves[i].begin(n_rows=n, more=self.of(n))
            at_staging, fields = buffer.staging(r), loan.fields.items()
            values = dict(
                sources=[at_staging + staged.fields[name].offset for name, _ in fields],
                targets=[loan.base + field.offset for _, field in fields],
                word_counts=[field.nbytes // 4 for _, field in fields],
            )
            more = [0] * (len(RECEIVED) - len(fields))
            fill(launch.words, {name: [*words, *more] for name, words in values.items()})
            loans[i] = loan
            launches.append(launch)
        buffer.start(launches)
        return loans


class DispatchPlan(ReceivingPlan):
    """Dispatches of these shapes. arrays: ARGUMENTS of FusedDispatch.forward, the last one only of FP8.

    options: num_experts, num_sms, on_device (as fused_dispatch_on_device says).
    """

    of_handle = False

    def __init__(self, buffer, names, arrays, options, group):
        x, token_indices, token_probs, *scales = arrays
        (num_experts, num_sms, on_device), n_ranks = options, buffer.n_ranks
        arguments.ranks_that_fit(n_ranks)
        self.local = local = arguments.experts_per_rank(num_experts, n_ranks)
        self.on_device, self.num_experts = on_device, local * n_ranks
        xs, scales = arguments.tokens(buffer, "x", x, *scales)
        num_tokens = [a.shape[0] for a in xs]
        ids = arguments.expert_indices(buffer, token_indices, num_tokens, self.num_experts)
        top_k, (_, hidden), dtype = ids[0].shape[1], xs[0].shape, xs[0].dtype
        of_probs = dict(dtypes=(FP32,), n_rows=num_tokens, n_columns=top_k)
        arguments.matrices(buffer, "token_probs", token_probs, **of_probs)
        n_scales = scales[0].shape[1] if scales else 0
        super().__init__(
            buffer,
            names,
            num_tokens,
            num_sms,
            call="fused_dispatch",
            hidden=hidden,
            dtype=str(dtype),
            num_experts=self.num_experts,
            top_k=top_k,
            has_scales=bool(n_scales),
            on_device=on_device,
        )
        self._expect_distinct(ids)
        buffer.want_experts(local, self.facts)
        self.expect_results(hidden, dtype, top_k, n_scales)
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
            num_sms,
            send=num_tokens,
            top_k=top_k,
            id_bytes=8 if wide else 4,
            scale_words=n_scales,
            has_probs=True,
            has_meta=True,
        )

        def needs(tokens):
            room = self.of(n_ranks * tokens)[0].nbytes if asks_for_results else 0
            return dict(result_bytes=room)

        buffer.want_pool(self.facts, needs, self.shape)
        self.capacity = n_ranks * max(buffer.max_tokens, *num_tokens)
        self.form = top_k, *num_tokens, self.capacity if on_device else None
        self.sums = dict(n_local_experts=1, top_k=top_k)
        per_expert = {"tokens_per_expert": ((local,), np.int64)}
        of_handle = [
            handle_memory("rows handle", n_ranks, per_expert | {"row_of": ((n, n_ranks), np.int32)})
            for n in num_tokens
        ]
        self.per_expert = [[one.fields["tokens_per_expert"]] for one in of_handle]
        self.places = [places(one, names=KEPT) for one in of_handle]
        lent = [[one] for one in of_handle]
        self.calls = self.sending(dispatch_kernel(self.shape), lent=lent, dtypes=dtypes)
        if not on_device:
            buffer.prepare_to_be_told(local)

    def _expect_distinct(self, ids):
        """Nothing, if the ids of arrays in host memory are of [-1, num_experts), and distinct in a token."""
        for i, a in enumerate(ids):
            if a.host is not None:
                what = f"token_indices of rank {self.buffer.ranks[i].rank}"
                inputs.check_ids(what, a.host, "num_experts", self.num_experts)

    def start(self, given, group, interface):
        """Launch: recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, and the handle."""
        buffer, on_device, rows, room = self.buffer, self.on_device, self.capacity, self.make_room
        results, launches, loans, memory, made = interface.results, [], [], [], []
        if buffer.is_captured and not on_device:
            buffer.refuse_capture("fused_dispatch", "call fused_dispatch_on_device")
        if device.SIM:
            self._expect_distinct([arrays[1] for _, _, arrays in given])
        for call, at_words, arrays in zip(self.calls, self.places, given):
            launch, (loan,) = call.begin(arrays)
            loans.append(room(call.r, launch, rows))
            launches.append(launch)
            memory.append(((loan, at_words),))
        if on_device:
            buffer.start(launches)
            handle = RowsHandle(self, None, memory, rows, group)
        else:
            told = buffer.start_and_hear(launches, self.local)
            capacity = buffer.n_ranks * buffer.max_tokens
            if not told[0].has_room:
                rows, loans = capacity, self._sent_again(launches, capacity)
            handle = RowsHandle(self, told[0].counts, memory, capacity, group)
        if None in loans:
            loans = self.moved(loans, rows, handle.num_rows)
        for i, loan in enumerate(loans):
            if on_device:
                (per_expert,) = results(memory[i][0][0], self.per_expert[i])
            else:
                per_expert = interface.told(told[i].tokens_per_expert)
            fields, n = loan.fields.values(), handle.num_rows[i]
            if n != rows:
                fields = [field.first(n) for field in fields]
            x, ids, probs, *scales = results(loan, fields)
            made.append(((x, *scales) if scales else x, ids, probs, per_expert))
        return made, handle

    def _sent_again(self, launches, rows):
        """Loans of rows that are sent once more: every rank has seen the same counts, and comes to the same number here."""
        buffer = self.buffer
        buffer.want_pool(self.facts, dict(result_bytes=self.of(rows)[0].nbytes))
        calls = self.sending(resend_kernel(self.shape))
        again = [call.begin_like(launch)[0] for call, launch in zip(calls, launches)]
        loans = [self.make_room(r, launch, rows) for r, launch in zip(buffer.ranks, again)]
        buffer.start(again)
        return loans


class CachedPlan(ReceivingPlan):
    """Cached dispatches: the rows of x [T, H] where an earlier dispatch sent its tokens. options: num_sms."""

    def __init__(self, buffer, names, arrays, options, handle):
        (x,), (num_sms,), num_tokens, self.room = arrays, options, handle.num_tokens, -1
        xs = arguments.hidden_rows(buffer, names[0], x, n_rows=num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        facts = dict(call="the gradient of combine", hidden=hidden, dtype=str(dtype))
        super().__init__(buffer, names, num_tokens, num_sms, **facts)
        self.expect_results(hidden, dtype)
        of_kernel = dict(send=num_tokens, top_k=1)
        self.shape = buffer.launches.shape(1, hidden * dtype.itemsize, num_sms, **of_kernel)

    def _want_room(self, rows):
        # Counts are known to all ranks, so all grow together; in the staging area there is then room on every rank.
        needs = dict(result_bytes=self.of(rows)[0].nbytes)
        self.buffer.want_pool(self.facts, needs, self.shape)
        self.calls, self.room = self.sending(resend_kernel(self.shape)), rows

    def start(self, given, handle, interface):
        """Launch: recv_x [N, H] of each rank, of x's dtype."""
        rows, launches, loans, made = handle.most_rows, [], [], []
        if rows > self.room:
            self._want_room(rows)
        for call, arrays, memory in zip(self.calls, given, handle.memory):
            launch, _ = call.begin(arrays, memory)
            loans.append(self.make_room(call.r, launch, rows))
            launches.append(launch)
        self.buffer.start(launches)
        if None in loans:
            loans = self.moved(loans, rows, handle.num_rows)
        for loan, n in zip(loans, handle.num_rows):
            x = loan.fields["x"]
            made.append(interface.results(loan, [x if n == rows else x.first(n)]))
        return made, None
