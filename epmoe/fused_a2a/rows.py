"""FusedDispatch on a Buffer: a token is sent once to a rank, however many of its experts are there."""

from array import array

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, NAMES
from epmoe.fused_a2a.launches import at
from epmoe.fused_a2a.plans import PLACES, TOLD, TOLD_NUMBER, Handle, Plan, X, handle_memory
from epmoe.host import inputs
from epmoe.host.arrays import Field
from epmoe.kernels.rows import dispatch_kernel, move_kernel, resend_kernel
from epmoe.kernels.rows.small.lamport import blocks_for

ARGUMENTS = "x", "token_indices", "token_probs", "scales"
SOURCES, TARGETS, WORD_COUNTS = map(at, ("sources", "targets", "word_counts"))
PLACE_OF = {name: PLACES + i for i, name in enumerate(("x", "ids", "probs", "scales"))}


class RowsHandle(Handle):
    """The routing of one FusedDispatch.forward, for any number of combines and cached dispatches.

    It depends only on ids and numbers of tokens, so data of another hidden size or dtype may use it. If the counts are
    only on the device, every rank has `capacity` rows, of which the first N hold tokens.
    """

    __slots__ = ()
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


class ReceivingPlan(Plan):
    """A plan in which peers write rows into the pool's heap, or into the staging area if the heap has no room."""

    def prepare_results(self, capacity, top_k=0, n_scales=0):
        """Make room on all ranks for `capacity` rows of this kind. self.of(rows) is a function made by arranged()."""
        of_row = {"x": ((self.hidden,), self.dtype)}
        if top_k:
            of_row |= {"ids": ((top_k,), np.int64), "probs": ((top_k,), FP32)}
        if n_scales:
            of_row["scales"] = (n_scales,), FP32
        self.of = self.arranged("rows result", of_row, PLACE_OF.get)
        self.takes = slice(X, X + len(of_row))  # words of the caller's x, ids, probs and scales
        self.capacity, (self.whole, self.results) = capacity, self.of(capacity)
        self.buffer.make_room(self.facts["call"], shape=self.shape, result_bytes=self.whole.nbytes, flag_rows=capacity)
        self.heaps = list(self.buffer.heaps.values())
        self.moves = self.rank_calls(move_kernel(self.buffer.launches.threads), [{}] * len(self.num_tokens))
        self.staged = self.whole.runs(self.buffer.pool_layout.staging_at)

    def launches(self, kernel):
        """A launch of each rank here, of a kernel that sends all tokens."""
        calls = self.rank_calls(kernel, [dict(capacity=self.capacity)] * len(self.num_tokens))
        most = self.capacity // self.buffer.n_ranks
        return [call.of(blocks_for(n, most, self.shape.lamport)) for call, n in zip(calls, self.num_tokens)]

    def moved(self, i, n):
        """Like run(): moves a rank's n rows out of the staging area; returns the results."""
        r, launch, (own, results) = self.buffer.ranks[i], self.moves[i].of(n), self.of(n)
        words, loan, at_staging = launch.words, r.arena.lend(own), self.buffer.staging(r)
        for j, (name, field) in enumerate(own.fields.items()):
            words[SOURCES + j] = at_staging + self.whole.fields[name].offset
            words[TARGETS + j], words[WORD_COUNTS + j] = loan.base + field.offset, field.nbytes // 4
        yield launch, loan
        return results(loan)


class DispatchPlan(ReceivingPlan):
    """A plan for dispatches of these shapes. arrays: ARGUMENTS of FusedDispatch.forward, scales only for FP8.

    options: num_experts, num_sms, on_device (as fused_dispatch_on_device says).
    """

    makes, remedy = RowsHandle, "call fused_dispatch_on_device"

    def __init__(self, buffer, call, interface, names, arrays, options, group):
        x, token_indices, token_probs, *scales = arrays
        (num_experts, num_sms, on_device), n_ranks = options, buffer.n_ranks
        self.local = local = arguments.experts_per_rank(num_experts, n_ranks)
        self.num_experts = local * n_ranks
        xs, scales = arguments.tokens(buffer, x, *scales)
        num_tokens = [a.shape[0] for a in xs]
        ids = arguments.expert_indices(buffer, token_indices, num_tokens, self.num_experts)
        top_k, n_scales = ids[0].shape[1], scales[0].shape[1] if scales else 0
        arguments.matrices(buffer, "token_probs", token_probs, dtypes=(FP32,), n_rows=num_tokens, n_columns=top_k)
        facts = dict(num_experts=self.num_experts, top_k=top_k, has_scales=bool(n_scales))
        self.buffer = buffer
        self.check_values([((), of_rank) for of_rank in zip(xs, ids)])  # before ranks wait for each other
        super().__init__(buffer, call, interface, names, num_tokens, num_sms, xs, not on_device, **facts)
        buffer.make_room(call, local)
        wide = all(a.dtype.itemsize == 8 for a in ids)
        # kernels read ids in this machine's byte order; on a GPU most ids need no conversion
        types = [a.dtype.newbyteorder("=") if wide else np.dtype(np.int32) for a in ids]
        if any(a.dtype != t or a.host is not None for a, t in zip(ids, types)):
            self.dtypes = {"token_indices": types[0]}
        of_kernel = dict(send=num_tokens, has_probs=True, has_meta=True, scale_words=n_scales)
        of_kernel |= dict(top_k=top_k, id_bytes=8 if wide else 4)
        self.shape = buffer.launches.shape(local, self.hidden * self.dtype.itemsize, num_sms, **of_kernel)
        buffer.agree_on_tokens(max(num_tokens), not on_device)
        self.prepare_results(n_ranks * buffer.max_tokens, top_k, n_scales)
        self.form, self.sums = (on_device, top_k, *num_tokens), dict(n_local_experts=1, top_k=top_k)
        if on_device:
            self.num_rows = [self.capacity] * len(ids)
        self.parts, per_expert = [], {"tokens_per_expert": ((local,), np.int64)}
        for r, n, launch in zip(buffer.ranks, num_tokens, self.launches(dispatch_kernel(self.shape))):
            memory = handle_memory("rows handle", n_ranks, per_expert | {"row_of": ((n, n_ranks), np.int32)})
            per_expert_of = self.results_of([memory.fields["tokens_per_expert"]])
            self.parts.append((r, launch, memory, per_expert_of))

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
        r, launch, memory, per_expert_of = self.parts[i]
        words, n = launch.words, self.capacity
        kept, loan = r.arena.lend(memory), self.heaps[i].lend(self.whole)
        handle.loans.append(kept)
        words[self.takes] = array("Q", addresses)
        for at_words, run in kept.piece.words:
            words[at_words] = run
        for at_words, run in self.staged if loan is None else loan.piece.words:
            words[at_words] = run
        if not self.is_exact:
            yield launch, (kept, loan)
            (per_expert,) = per_expert_of(kept)
        else:
            on_host = self.buffer.host_words
            words[TOLD], words[TOLD_NUMBER] = on_host.addresses[i], on_host.number
            yield launch, ()
            _, counts, per_expert = self.buffer.told(i, self.local, self.interface)
            if i == 0:
                handle.know([sum(counts[r.rank :: self.buffer.n_ranks]) for r in self.buffer.ranks])
            n = handle.num_rows[i]
        if loan is None:
            results = yield from self.moved(i, n)
        else:
            results = self.results(loan) if n == self.capacity else self.results(loan, n)
        x, ids, probs, *scales = results
        made[i] = ((x, *scales) if scales else x), ids, probs, per_expert


class CachedPlan(ReceivingPlan):
    """A plan for cached dispatches: sends x [T, H] where an earlier dispatch sent its tokens. options: num_sms."""

    def __init__(self, buffer, call, interface, names, arrays, options, handle):
        (x,), (num_sms,), num_tokens = arrays, options, handle.num_tokens
        xs = arguments.matrices(buffer, names[0], x, n_rows=num_tokens, vectors=True)
        super().__init__(buffer, call, interface, names, num_tokens, num_sms, xs)
        row_bytes = self.hidden * self.dtype.itemsize
        self.shape = buffer.launches.shape(1, row_bytes, num_sms, send=num_tokens, top_k=1)
        self.prepare_results(handle.capacity)
        self.parts = self.launches(resend_kernel(self.shape))

    def run(self, i, addresses, handle, made):
        """See Plan. Results: recv_x [N, H], of x's dtype."""
        n, launch, loan = handle.num_rows[i], self.parts[i], self.heaps[i].lend(self.whole)
        words = launch.words
        words[X] = addresses[0]
        for at_words, run in (*handle.loans[i].piece.words, *(loan.piece.words if loan else self.staged)):
            words[at_words] = run
        yield launch, loan
        if loan is None:
            made[i] = yield from self.moved(i, n)
        else:
            made[i] = self.results(loan) if n == self.capacity else self.results(loan, n)


RowsHandle.CACHED = CachedPlan
