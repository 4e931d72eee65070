"""FusedDispatch on a Buffer: a token is sent once to a rank, however many of its experts are there."""

from array import array

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, NAMES
from epmoe.fused_a2a.launches import RankCall, fill
from epmoe.fused_a2a.plans import CAPACITY, NO_ROOM, PLACES, TOLD, TOLD_NUMBER, Handle, Plan, X, handle_memory
from epmoe.host import inputs
from epmoe.host.arrays import Field
from epmoe.kernels.rows import dispatch_kernel, move_kernel, resend_kernel
from epmoe.kernels.rows.shape import MAX_PLACES
from epmoe.kernels.rows.small.lamport import blocks_for

ARGUMENTS = "x", "token_indices", "token_probs", "scales"
KEPT = "row_of", "counts"
PLACE_OF = {name: PLACES + i for i, name in enumerate(("x", "ids", "probs", "scales"))}


class RowsHandle(Handle):
    """The routing of one FusedDispatch.forward, for any number of combines and cached dispatches.

    It depends only on ids and numbers of tokens, so data of another hidden size or dtype may use it. counts: see
    Buffer.told(). If they are only on the device, every rank has `capacity` rows, of which the first N hold tokens.
    """

    __slots__ = ("counts",)
    DISPATCH, COMBINE = "fused_dispatch", "fused_combine"
    GRADIENT = "grad_output", "probs of grad_output"
    num_sms = None, None  # for all handles; set_deepep_num_sms replaces it
    summed = tuple(NAMES)

    probs_a_row = property(lambda self: self.sums["top_k"])

    @property
    def recv_count(self):
        """On the device: rows that came from each src_rank, int32 [R], N in all; with a LocalWorld a list over ranks."""
        n, made = self.buffer.n_ranks, []
        for r, kept in zip(self.buffer.ranks, self.loans):
            at = kept.fields["counts"].offset + 4 * r.rank
            made += self.plan.results_of([Field((n,), np.int32, at, (4 * n,))])(kept)
        return made if self.buffer.world_has_lists else made[0]

    def count_rows(self, counts):
        """Take the counts that the host was told."""
        self.counts, n = counts, self.buffer.n_ranks
        self.num_rows = [sum(counts[r.rank :: n]) for r in self.buffer.ranks]
        self.capacity = max([sum(counts[i : i + n]) for i in range(0, n * n, n)])

    def most_rows(self):
        """The most rows that any rank received; if only the device knows the counts, that it has room for."""
        if not self.plan.is_exact:
            return self.capacity
        n = self.buffer.n_ranks
        return max([sum(self.counts[rank::n]) for rank in range(n)])


class ReceivingPlan(Plan):
    """A plan in which peers write rows into the pool's heap, or into the staging area if the heap has no room."""

    def prepare_results(self, hidden, dtype, top_k=0, n_scales=0):
        """Prepare for rows of this kind; self.of(rows) is a function made by arranged()."""
        of_row = {"x": ((hidden,), dtype)}
        if top_k:
            of_row |= {"ids": ((top_k,), np.int64), "probs": ((top_k,), FP32)}
        if n_scales:
            of_row["scales"] = (n_scales,), FP32
        self.of, self._moves = self.arranged("rows result", of_row, PLACE_OF.get), {}
        self.takes = slice(X, X + len(of_row))  # words of the caller's x, ids, probs and scales

    def sending(self, kernel, i):
        """(RankCall, launch) of the i-th rank here, of a kernel that sends all tokens."""
        call = RankCall(self, i, kernel)
        return call, call.of(blocks_for(self.num_tokens[i], self.shape.lamport))

    def staged(self, arrangement, rows):
        """Launch words, as from Arrangement.runs(), that make kernels receive in the staging area."""
        layout = self.buffer.pool_layout
        capacity = rows if arrangement.nbytes <= layout.staging_bytes else NO_ROOM
        at_capacity = slice(CAPACITY, CAPACITY + 1), array("Q", [capacity])
        return *arrangement.runs(layout.staging_at, arrangement.words), at_capacity

    def moved(self, i, rows, n):
        """(launch that moves a rank's n rows out of the staging area, laid out for `rows` rows; Loan of them)."""
        if i not in self._moves:
            self._moves[i] = RankCall(self, i, move_kernel(self.buffer.launches.threads))
        r, (staged, _), (own, _) = self.buffer.ranks[i], self.of(rows), self.of(n)
        launch, loan, at_staging = self._moves[i].of(n), r.arena.lend(own), self.buffer.staging(r)
        fields, more = own.fields, [0] * (MAX_PLACES - len(own.fields))
        values = dict(
            sources=[at_staging + staged.fields[name].offset for name in fields],
            targets=[loan.base + field.offset for field in fields.values()],
            word_counts=[field.nbytes // 4 for field in fields.values()],
        )
        fill(launch.words, {name: words + more for name, words in values.items()})
        return launch, loan


class DispatchPlan(ReceivingPlan):
    """A plan for dispatches of these shapes. arrays: ARGUMENTS of FusedDispatch.forward, scales only for FP8.

    options: num_experts, num_sms, on_device (as fused_dispatch_on_device says).
    """

    makes = RowsHandle

    def __init__(self, buffer, interface, names, arrays, options, group):
        x, token_indices, token_probs, *scales = arrays
        (num_experts, num_sms, on_device), n_ranks = options, buffer.n_ranks
        arguments.ranks_that_fit(n_ranks)
        self.local = local = arguments.experts_per_rank(num_experts, n_ranks)
        self.on_device, self.is_exact = on_device, not on_device
        self.num_experts = local * n_ranks
        xs, scales = arguments.tokens(buffer, "x", x, *scales)
        num_tokens = [a.shape[0] for a in xs]
        ids = arguments.expert_indices(buffer, token_indices, num_tokens, self.num_experts)
        top_k, (_, hidden), dtype = ids[0].shape[1], xs[0].shape, xs[0].dtype
        arguments.matrices(buffer, "token_probs", token_probs, dtypes=(FP32,), n_rows=num_tokens, n_columns=top_k)
        n_scales = scales[0].shape[1] if scales else 0
        facts = dict(call="fused_dispatch", hidden=hidden, dtype=str(dtype))
        facts |= dict(num_experts=self.num_experts, top_k=top_k)
        facts |= dict(has_scales=bool(n_scales), on_device=on_device)
        super().__init__(buffer, interface, names, num_tokens, num_sms, **facts)
        self.check_values([((), of_rank) for of_rank in zip(xs, ids)])  # before memory grows
        buffer.want_experts(local, self.facts)
        self.prepare_results(hidden, dtype, top_k, n_scales)
        wide = all(a.dtype.itemsize == 8 for a in ids)
        # kernels read ids in this machine's byte order; on a GPU most ids need no conversion
        types = [a.dtype.newbyteorder("=") if wide else np.dtype(np.int32) for a in ids]
        if any(a.dtype != t or a.host is not None for a, t in zip(ids, types)):
            self.dtypes = {"token_indices": types[0]}
        of_kernel = dict(send=num_tokens, has_probs=True, has_meta=True, scale_words=n_scales)
        of_kernel |= dict(top_k=top_k, id_bytes=8 if wide else 4)
        self.shape = buffer.launches.shape(local, hidden * dtype.itemsize, num_sms, **of_kernel)
        buffer.agree_on_tokens(max(num_tokens), not (buffer.knows_all_ranks or on_device))
        room = self.of(n_ranks * buffer.max_tokens)[0].nbytes
        buffer.want_pool(self.facts, dict(result_bytes=room), self.shape)
        self.room = n_ranks * max(buffer.max_tokens, *num_tokens)
        self.whole, self.results = self.of(self.room)
        self.form = (top_k, *num_tokens, self.room if on_device else None)
        self.sums = dict(n_local_experts=1, top_k=top_k)
        if on_device:
            self.num_rows, self.capacity = [self.room] * len(ids), self.room
        self.parts, per_expert = [], {"tokens_per_expert": ((local,), np.int64)}
        for i, n in enumerate(num_tokens):
            call, launch = self.sending(dispatch_kernel(self.shape), i)
            arrays = per_expert | {"row_of": ((n, n_ranks), np.int32)}
            memory = handle_memory("rows handle", n_ranks, KEPT, arrays)
            per_expert_of = self.results_of([memory.fields["tokens_per_expert"]])
            self.parts.append((call.r, launch, memory, per_expert_of))
        if not on_device:
            self.remedy = "call fused_dispatch_on_device"
            buffer.prepare_to_be_told(local)

    def check_values(self, given):
        """Raise EPValueError for ids in host memory that are outside [-1, num_experts) or occur twice in a token.

        given: (addresses, arrays) of each rank.
        """
        for r, (_, arrays) in zip(self.buffer.ranks, given):
            if getattr(arrays[1], "host", None) is not None:
                what = f"token_indices of rank {r.rank}"
                inputs.check_ids(what, arrays[1].host, "num_experts", self.num_experts)

    def run(self, i, addresses, handle, made):
        """See Plan. Results: recv_x, recv_token_indices, recv_token_probs, tokens_per_expert.

        For an exact dispatch the host waits for the numbers of rows.
        """
        (r, launch, memory, per_expert_of), results = self.parts[i], self.results
        words, n, rows = launch.words, self.room, self.room  # n: of the results; rows: that memory is laid out for
        kept, loan = r.arena.lend(memory), r.heap.lend(self.whole)
        handle.loans.append(kept)
        words[self.takes], words[CAPACITY] = array("Q", addresses), rows
        for at_words, run in kept.piece.words:
            words[at_words] = run
        for at_words, run in self.staged(self.whole, rows) if loan is None else loan.piece.words:
            words[at_words] = run
        if self.on_device:
            yield launch, (kept, loan)
            (per_expert,) = per_expert_of(kept)
        else:
            on_host = self.buffer.host_words
            words[TOLD], words[TOLD_NUMBER] = on_host.addresses[i], on_host.number
            yield launch, ()
            _, counts, per_expert = self.buffer.told(i, self.local, self.interface)
            if i == 0:
                handle.count_rows(counts)
            n = handle.num_rows[i]
        if loan is None:
            launch, loan = self.moved(i, rows, n)
            yield launch, loan
            rows, results = n, self.of(n)[1]
        x, ids, probs, *scales = results(loan) if n == rows else results(loan, n)
        made[i] = ((x, *scales) if scales else x), ids, probs, per_expert


class CachedPlan(ReceivingPlan):
    """A plan for cached dispatches: sends x [T, H] where an earlier dispatch sent its tokens. options: num_sms."""

    def __init__(self, buffer, interface, names, arrays, options, handle):
        (x,), (num_sms,), num_tokens, self.room = arrays, options, handle.num_tokens, -1
        xs = arguments.hidden_rows(buffer, names[0], x, n_rows=num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        facts = dict(call="the gradient of combine", hidden=hidden, dtype=str(dtype))
        super().__init__(buffer, interface, names, num_tokens, num_sms, **facts)
        self.prepare_results(hidden, dtype)
        self.shape = buffer.launches.shape(1, hidden * dtype.itemsize, num_sms, send=num_tokens, top_k=1)

    def _want_room(self, rows):
        # All ranks know the counts, so all grow together. Then every rank has room in the staging area.
        needs = dict(result_bytes=self.of(rows)[0].nbytes)
        self.buffer.want_pool(self.facts, needs, self.shape)
        kernel, n_ranks = resend_kernel(self.shape), len(self.num_tokens)
        self.parts, self.room = [self.sending(kernel, i) for i in range(n_ranks)], rows

    def run(self, i, addresses, handle, made):
        """See Plan. Results: recv_x [N, H], of x's dtype."""
        n, rows = handle.num_rows[i], handle.most_rows()
        if rows > self.room:
            self._want_room(rows)
        (call, launch), (arrangement, results) = self.parts[i], self.of(rows)
        words, loan = launch.words, call.r.heap.lend(arrangement)
        words[X], words[CAPACITY] = addresses[0], rows
        room = self.staged(arrangement, rows) if loan is None else loan.piece.words
        for at_words, run in (*handle.loans[i].piece.kept, *room):
            words[at_words] = run
        yield launch, loan
        if loan is None:
            launch, loan = self.moved(i, rows, n)
            yield launch, loan
            rows, results = n, self.of(n)[1]
        made[i] = results(loan) if n == rows else results(loan, n)


RowsHandle.CACHED = CachedPlan
