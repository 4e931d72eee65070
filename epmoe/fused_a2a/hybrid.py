"""HybridEPDispatch on a Buffer: a row for each (token, local expert), grouped by expert.

A token is sent once to a rank, which expands it to rows, in the staging area's order. On the way back each rank first
sums its experts' rows. Results lie in a rank's own memory, so ranks need not agree on free room in the pool.
"""

from array import array
from dataclasses import replace
from operator import attrgetter

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.launches import at
from epmoe.fused_a2a.plans import PLACES, TOLD, TOLD_NUMBER, Handle, Plan, X, handle_memory
from epmoe.host.memory_pool import arrange, size_class
from epmoe.kernels.rows import dispatch_kernel, receive_kernel, resend_kernel
from epmoe.kernels.rows.send import expert_masks, fp8_format
from epmoe.kernels.rows.shape import NO_LIMIT
from epmoe_ref.errors import EPValueError

TYPES = (BF16, FP16)
ARGUMENTS = "x", "routing_map", "probs"
ROW_STEP = 32  # at least; results whose number of rows is not known have a multiple of it
N_ROWS, OUT_ROWS, PAD = at("num_rows"), at("out_rows"), at("pad_multiple")


class HybridHandle(Handle):
    """The routing of one HybridEPDispatch.forward, for any number of combines and cached dispatches.

    It depends only on the routing map and the options. num_rows: P. overflow: int32 [1], 1 if the padded rows did not
    all fit into P; with a LocalWorld a list over ranks. handle[-1] is overflow too, because upstream's handle is a
    tuple that ends with it; a tensor under torch.
    """

    __slots__ = ()
    __iter__ = None  # only its last entry, overflow, can be read
    DISPATCH, COMBINE = "hybrid_ep_dispatch", "hybrid_ep_combine"
    GRADIENT = "grad_x", "probs of grad_x"
    summed, probs_a_row = TYPES, 0

    num_sms = property(attrgetter("plan.num_sms_of"))
    pad_multiple = property(attrgetter("plan.pad"))

    @property
    def overflow(self):
        """The flag of each rank here, or this rank's own."""
        flags = [results(kept)[0] for results, kept in zip(self.plan.overflows, self.loans)]
        return flags if self.buffer.world_has_lists else flags[0]

    def __getitem__(self, index):
        if index != -1:
            raise IndexError(f"handle[{index}]: a handle is opaque but for handle[-1], the overflow flag")
        return self.overflow


def staging_area(rows, row_bytes, local):
    """({name: Field}, bytes) of the staging area that holds `rows` rows until they are expanded."""
    arrays = {
        "x": ((rows, row_bytes), np.uint8),
        "numbers": ((rows, local), np.int32),
        "probs": ((rows, local), FP32),
        "masks": ((rows, expert_masks(local)), np.uint32),
    }
    return arrange(arrays)


class ExpandingPlan(Plan):
    """A plan in which rows arrive in the staging area and are expanded into the results, grouped by expert."""

    def prepare_results(self, shape, dtype):
        """Prepare for results of this kind; self.of(rows) is a function made by arranged()."""
        self.shape, of_row = shape, {"out": ((self.hidden,), dtype)}
        if shape.has_probs:
            of_row["out_probs"] = (), FP32
        if shape.scale_words:
            of_row["out_scales"] = (shape.scale_words,), FP32
        self.of = self.arranged("hybrid result", of_row)

    def stage(self, rows, local, shape=None):
        """Make room to receive `rows` rows in the staging area; {field: value} of each rank's launches that do."""
        buffer = self.buffer
        fields, nbytes = staging_area(rows, self.shape.row_bytes, local)
        buffer.make_room(self.facts["call"], local, shape, staging_bytes=nbytes, flag_rows=rows)
        layout, offsets = buffer.pool_layout, [field.offset for field in fields.values()]
        staged = dict(places=[layout.staging_at + offset for offset in offsets], capacity=rows, out_rows=NO_LIMIT)
        return [staged | dict(sources=[buffer.staging(r) + offset for offset in offsets]) for r in buffer.ranks]


class DispatchPlan(ExpandingPlan):
    """A plan for dispatches of these shapes and options. arrays: ARGUMENTS of HybridEPDispatch.forward.

    options: num_local_experts, num_permuted_tokens, pad_multiple, fp8_dispatch, the group's p2p_world_size or None, num_sms
    of dispatch and combine.
    """

    makes, remedy = HybridHandle, "give num_permuted_tokens"

    def __init__(self, buffer, call, interface, names, arrays, options, group):
        x, routing_map, *probs = arrays
        num_local_experts, limit, pad_multiple, is_fp8, a_world, self.num_sms_of = options
        n_ranks, num_sms = buffer.n_ranks, self.num_sms_of[0]
        self.local = local = arguments.local_experts(num_local_experts, n_ranks)
        self.pad = arguments.padding(pad_multiple, local)
        if limit is not None:
            limit = arguments.rows("num_permuted_tokens", limit)
        xs = arguments.matrices(buffer, "x", x, dtypes=TYPES, vectors=True)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        if is_fp8 and (dtype != BF16 or hidden % FP8_GROUP):
            raise EPValueError(
                f"fp8_dispatch=True needs bfloat16 rows of a multiple of {FP8_GROUP} elements; x is {dtype} "
                f"with {hidden} columns"
            )
        num_tokens, self.limit = [a.shape[0] for a in xs], limit
        because = f": n_ranks={n_ranks} times num_local_experts={local}"
        of_all = dict(n_rows=num_tokens, n_columns=local * n_ranks, because=because)
        arguments.matrices(buffer, "routing_map", routing_map, dtypes=(np.dtype(bool),), **of_all)
        for of_ranks in probs:
            arguments.matrices(buffer, "probs", of_ranks, dtypes=(FP32,), **of_all)
        facts = dict(num_local_experts=local, has_probs=bool(probs), fp8_dispatch=is_fp8)
        facts |= dict(has_num_permuted_tokens=limit is not None)
        super().__init__(buffer, call, interface, names, num_tokens, num_sms, xs, limit is None, **facts)
        self.form = local, tuple(num_tokens), a_world, limit
        self.sums = dict(n_local_experts=local, p2p_world_size=a_world or n_ranks)
        row_bytes = hidden * dtype.itemsize
        of_kernel = dict(expand=num_tokens, has_probs=bool(probs), has_meta=True)
        if is_fp8:
            row_bytes = fp8_format(hidden).token_size
            of_kernel |= dict(value_bytes=hidden, scale_words=hidden // FP8_GROUP, encode=True)
        shape = buffer.launches.shape(local, row_bytes, num_sms, **of_kernel)
        buffer.agree_on_tokens(max(num_tokens), limit is None)
        self.prepare_results(shape, E4M3 if is_fp8 else dtype)
        self.capacity = rows = n_ranks * buffer.max_tokens
        more = dict(num_rows=NO_LIMIT if limit is None else limit, pad_multiple=self.pad)
        values = [staged | more for staged in self.stage(rows, local, shape)]
        self.calls, self.ready = self.rank_calls(dispatch_kernel(shape), values), [None] * len(num_tokens)
        for i in range(len(num_tokens)):
            self._prepare_for(i, limit or 0)
        if limit is None:  # the host waits for the numbers of rows
            self.receiving = self.rank_calls(receive_kernel(shape), values)
            for call, n in zip(self.receiving, num_tokens):
                call.of(n)  # compiled before peers wait for this rank
        else:
            self.num_rows = [limit] * len(num_tokens)
        arrays = {
            "tokens_per_expert": ((local,), np.int64),
            "overflow": ((1,), np.int32),
            "expert_base": ((n_ranks, local), np.int32),
            "expert_rows": ((2, local), np.int32),
            "expert_row": ((rows, local), np.int32),
        }
        of_ranks = [arrays | {"row_of": ((n, n_ranks), np.int32)} for n in num_tokens]
        self.kept = [handle_memory("hybrid handle", n_ranks, of_rank) for of_rank in of_ranks]
        self.per_expert, self.overflows = (
            [self.results_of([kept.fields[name]]) for kept in self.kept] for name in ("tokens_per_expert", "overflow")
        )
        scratch = {"row_of_expert": ((shape.num_experts,), np.int32)}
        self.scratch = [self.arranged("rows scratch", scratch)(n)[0] for n in num_tokens]

    def _prepare_for(self, i, most):
        """Prepare the i-th rank's next results for `most` rows by expert and a few more, or exactly the limit."""
        room = size_class(most + most // 16, ROW_STEP) if self.limit is None else self.limit
        self.ready[i] = most, room, *self.of(room)

    def run(self, i, addresses, handle, made):
        """See Plan. Results: dispatched_hidden, probs, scales, tokens_per_expert.

        Exact results have room for a few more rows than came in recent calls. If more come, a second launch stores them.
        """
        call, (most, room, arrangement, results) = self.calls[i], self.ready[i]
        launch, lend, n = call.of(self.num_tokens[i] + most), call.r.arena.lend, room
        words = launch.words
        words[X : X + len(addresses)] = array("Q", addresses)  # x, ids, probs
        kept, scratch, out = lend(self.kept[i]), lend(self.scratch[i]), lend(arrangement)
        for loan in (kept, scratch, out):
            for at_words, run in loan.piece.words:
                words[at_words] = run
        handle.loans.append(kept)
        if self.limit is not None:
            yield launch, (kept, out, scratch)
            (per_expert,) = self.per_expert[i](kept)
        else:
            buffer, on_host = self.buffer, self.buffer.host_words
            words[OUT_ROWS] = room
            words[TOLD], words[TOLD_NUMBER] = on_host.addresses[i], on_host.number
            yield launch, ()
            n, _, per_expert = buffer.told(i, self.local, self.interface)
            if i == 0:
                handle.know([])
            handle.num_rows.append(n)
            if n > room:
                arrangement, results = self.of(n)
                again, out, room = self.receiving[i].of(self.num_tokens[i] + n), lend(arrangement), n
                again.words[PLACES:] = words[PLACES:]
                for at_words, run in out.piece.words:
                    again.words[at_words] = run
                again.words[OUT_ROWS] = NO_LIMIT
                yield again, ()
            self._prepare_for(i, max(n, most - most // 16))
        x, *more = results(out) if n == room else results(out, n)
        probs = more.pop(0) if self.shape.has_probs else None
        made[i] = x, probs, more[0] if more else None, per_expert


class CachedPlan(ExpandingPlan):
    """A plan for cached dispatches: tokens x [T, H] become rows where an earlier one put them. options: num_sms."""

    def __init__(self, buffer, call, interface, names, arrays, options, handle):
        (x,), (num_sms,) = arrays, options
        xs = arguments.matrices(buffer, names[0], x, dtypes=TYPES, n_rows=handle.num_tokens, vectors=True)
        super().__init__(buffer, call, interface, names, handle.num_tokens, num_sms, xs)
        row_bytes, local = self.hidden * self.dtype.itemsize, handle.sums["n_local_experts"]
        shape = replace(buffer.launches.shape(local, row_bytes, num_sms), lamport=0)
        self.prepare_results(shape, self.dtype)
        self.calls = self.rank_calls(resend_kernel(shape), self.stage(handle.capacity, 0))

    def run(self, i, addresses, handle, made):
        """See Plan. Results: rows [P, H] grouped by expert, in x's dtype."""
        n, call = handle.num_rows[i], self.calls[i]
        launch, (out, results) = call.of(self.num_tokens[i] + n), self.of(n)
        words, loan = launch.words, call.r.arena.lend(out)
        words[X], words[N_ROWS], words[PAD] = addresses[0], n, handle.pad_multiple
        for at_words, run in (*handle.loans[i].piece.words, *loan.piece.words):
            words[at_words] = run
        yield launch, loan
        made[i] = results(loan)


HybridHandle.CACHED = CachedPlan
