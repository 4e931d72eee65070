"""HybridEPDispatch on a Buffer: a row for each (token, local expert), grouped by expert.

A token travels once to a rank and is expanded there, in the staging area's order; on the way back each rank sums its
experts' rows first. Results are a rank's own memory, so no call needs room that another may lack.
"""

from operator import attrgetter

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.launches import at
from epmoe.fused_a2a.plans import NO_ROOM, Handle, Numbers, Plan, X, handle_memory
from epmoe.host.memory_pool import arrange
from epmoe.kernels.rows import dispatch_kernel, expand_kernel, resend_kernel
from epmoe.kernels.rows.send import expert_masks, fp8_format
from epmoe_ref.errors import EPValueError

TYPES = (BF16, FP16)
ARGUMENTS = "x", "routing_map", "probs"
KEPT = (
    "counts",
    "row_of",
    "expert_rows",
    "expert_base",
)  # what later calls read of a handle's own memory
NO_LIMIT = 2**31 - 1
N_ROWS, PAD = at("num_rows"), at("pad_multiple")


class HybridHandle(Handle):
    """The routing of one HybridEPDispatch.forward, for any number of combines and cached dispatches.

    It depends on the routing map and the options alone. num_rows: P. overflow: int32 [1], 1 if the padded rows did not
    all fit into P; with a LocalWorld a list over ranks. It is handle[-1] too, as in the tuple that upstream's handle is,
    and a tensor there under torch. capacity: rows that a rank receives before they are expanded, or gets back, at most.
    """

    __slots__ = ()
    CALLS = (
        "hybrid_ep_combine",
        "the gradient of hybrid_ep_dispatch",
        "the gradient of hybrid_ep_combine",
    )
    GRADIENT = "grad_x", "probs of grad_x"
    summed, probs_a_row = TYPES, 0

    def __init__(self, plan, loans, words, group, form, numbers):
        self.plan, self.buffer, self.loans, self.words = plan, plan.buffer, loans, words
        self.group, self.form, self.numbers = group, form, numbers

    num_sms = property(attrgetter("plan.num_sms_of"))
    pad_multiple = property(attrgetter("plan.pad"))

    @property
    def overflow(self):
        """The flag of each rank here, or this rank's own."""
        flags = [results(kept)[0] for results, (_, kept) in zip(self.plan.overflows, self.loans)]
        return flags if self.buffer.world_has_lists else flags[0]

    def __getitem__(self, index):
        if index != -1:
            raise IndexError(
                f"handle[{index}]: a handle is opaque but for handle[-1], the overflow flag"
            )
        return self.overflow


def _staged(rows, row_bytes, local):
    """({name: Field} of the staging area, between sending and expanding so many rows; its bytes)."""
    arrays = {
        "x": ((rows, row_bytes), np.uint8),
        "slots": ((rows, local), np.int32),
        "probs": ((rows, local), FP32),
        "masks": ((rows, expert_masks(local)), np.uint32),
    }
    return arrange(arrays)


def needs(rows, row_bytes, local):
    """Of the pool, for so many rows that are expanded: what PoolLayout.grown() takes."""
    return dict(staging_bytes=_staged(rows, row_bytes, local)[1], flag_rows=rows)


class ExpandingPlan(Plan):
    """A plan of rows that come into the staging area and are expanded to the results, rows of experts."""

    def expect_results(self, shape, hidden, dtype):
        """Prepare for results of this kind: of(rows), as arranged() makes it."""
        self.shape, of_row = shape, {"out": ((hidden,), dtype)}
        if shape.has_probs:
            of_row["out_probs"] = (), FP32
        if shape.scale_words:
            of_row["out_scales"] = (shape.scale_words,), FP32
        self.of = self.arranged("hybrid result", of_row)

    def stage(self, rows, local):
        """Values of words about a staging area of so many rows: staged, of kernels that send; expanded, of each rank's that expands."""
        buffer, layout = self.buffer, self.buffer.pool_layout
        fields, nbytes = _staged(rows, self.shape.row_bytes, local)
        offsets = [field.offset for field in fields.values()]
        self.staged = dict(
            places=[layout.staging_at + offset for offset in offsets],
            capacity=rows if nbytes <= layout.staging_bytes else NO_ROOM,
        )
        self.expanded = [
            self.staged | dict(sources=[buffer.staging(r) + offset for offset in offsets])
            for r in buffer.ranks
        ]

    def rows_of_experts(self, given, of_handle, num_rows, pad):
        """Results: rows of experts, of what has come into the staging area, or comes now. Launches.

        given: (addresses, arrays) of each rank, or nothing. of_handle: what kernels are told of a handle, of each rank.
        """
        launches, loans, made = [], [], []
        for i, (call, n) in enumerate(zip(self.expanding, self.num_tokens)):
            n_rows = num_rows[i]
            launch, (out, results) = call[min(n + n_rows + 1, call.most)], self.of(n_rows)
            words, loan = launch.words, call.r.arena.lend(out)
            words[N_ROWS], words[PAD] = n_rows, pad
            if given:
                words[X] = given[i][0][0]
            for at_words, run in (*of_handle[i], *loan.piece.words):
                words[at_words] = run
            loans.append(loan)
            launches.append(launch)
            made.append(results(loan))
        self.buffer.start(launches, loans)
        return made


class DispatchPlan(ExpandingPlan):
    """Dispatches of these shapes and options. arrays: ARGUMENTS of HybridEPDispatch.forward.

    options: num_local_experts, num_permuted_tokens, pad_multiple, fp8_dispatch, p2p_world_size, num_sms of dispatch and
    combine.
    """

    of_handle, is_exact = False, True

    def __init__(self, buffer, interface, names, arrays, options, group):
        x, routing_map, *probs = arrays
        num_local_experts, limit, pad_multiple, is_fp8, a_world, self.num_sms_of = options
        n_ranks, num_sms, is_fp8 = buffer.n_ranks, self.num_sms_of[0], bool(is_fp8)
        arguments.ranks_that_fit(n_ranks)
        self.local = local = arguments.local_experts(num_local_experts, n_ranks)
        self.pad = arguments.padding(pad_multiple, local)
        if limit is not None:
            limit = arguments.rows("num_permuted_tokens", limit)
        a_world = n_ranks if a_world is None else arguments.whole("p2p_world_size", a_world, 1)
        if n_ranks % a_world:
            raise EPValueError(f"p2p_world_size={a_world} must divide n_ranks={n_ranks}")
        xs = arguments.hidden_rows(buffer, "x", x, dtypes=TYPES)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        if is_fp8 and (dtype != BF16 or hidden % FP8_GROUP):
            raise EPValueError(
                f"fp8_dispatch=True needs bfloat16 rows of a multiple of {FP8_GROUP} elements; x is {dtype} "
                f"with {hidden} columns"
            )
        num_tokens, self.limit, names = [a.shape[0] for a in xs], limit, names[: len(arrays)]
        of_all = dict(
            n_rows=num_tokens,
            n_columns=local * n_ranks,
            because=f": n_ranks={n_ranks} times num_local_experts={local}",
        )
        arguments.matrices(buffer, "routing_map", routing_map, dtypes=(np.dtype(bool),), **of_all)
        for of_ranks in probs:
            arguments.matrices(buffer, "probs", of_ranks, dtypes=(FP32,), **of_all)
        super().__init__(
            buffer,
            interface,
            names,
            num_tokens,
            num_sms,
            call="hybrid_ep_dispatch",
            hidden=hidden,
            dtype=str(dtype),
            num_local_experts=local,
            has_probs=bool(probs),
            fp8_dispatch=is_fp8,
            has_num_permuted_tokens=limit is not None,
        )
        self.form = local, tuple(num_tokens), a_world
        self.sums = dict(n_local_experts=local, p2p_world_size=a_world)
        buffer.want_experts(local, self.facts)
        shape = buffer.launches.shape(
            local,
            fp8_format(hidden).token_size if is_fp8 else hidden * dtype.itemsize,
            num_sms,
            expand=num_tokens,
            has_probs=bool(probs),
            has_meta=True,
            value_bytes=hidden if is_fp8 else 0,
            scale_words=hidden // FP8_GROUP if is_fp8 else 0,
            encode=is_fp8,
        )
        if buffer.knows_all_ranks or limit is not None and buffer.max_tokens:
            # without a look at the device, a batch larger than any before is taken to be that large on all ranks
            buffer.want_tokens(max(num_tokens))
        self.expect_results(shape, hidden, E4M3 if is_fp8 else dtype)
        arrays = {
            "tokens_per_expert": ((local,), np.int64),
            "overflow": ((1,), np.int32),
            "expert_base": ((n_ranks, local), np.int32),
            "expert_rows": ((2, local), np.int32),
        }
        self.kept = [
            handle_memory(
                "hybrid handle", n_ranks, KEPT, arrays | {"row_of": ((n, n_ranks), np.int32)}
            )
            for n in num_tokens
        ]
        self.per_expert, self.overflows = (
            [self.results_of([kept.fields[name]]) for kept in self.kept]
            for name in ("tokens_per_expert", "overflow")
        )
        of_scratch = self.arranged(
            "rows scratch", {"row_of_expert": ((shape.num_experts,), np.int32)}
        )
        self.scratch = [of_scratch(n)[0] for n in num_tokens]
        # one launch does it all where the host need not know the number of rows
        self.is_one_launch = limit is not None and (buffer.knows_all_ranks or buffer.max_tokens > 0)
        if self.is_one_launch:
            shape = buffer.launches.expanding(shape, num_tokens, num_sms)
        else:
            self.remedy = "give num_permuted_tokens, and call it once before"
            buffer.prepare_to_be_told(local)
        self._prepare(dispatch_kernel(shape), shape if self.is_one_launch else None)
        self.numbers = self._numbers([limit] * len(num_tokens))

    def _numbers(self, num_rows):
        # a rank with more tokens than any before gets more rows back than there was room for where they were received
        capacity = self.buffer.n_ranks * self.buffer.max_tokens
        return Numbers(None, num_rows, capacity, capacity, capacity)

    def _prepare(self, kernel, expanding=None):
        """Launches of a kernel that sends, for the most tokens so far. expanding: its shape, if it expands rows as well."""
        buffer, local = self.buffer, self.local
        # else the first call asks the ranks for their tokens
        if buffer.knows_all_ranks or buffer.max_tokens:
            buffer.want_pool(self.facts, self._needs, expanding)
        rows = buffer.n_ranks * buffer.max_tokens
        self.stage(rows, local)
        self.rows, _ = self.arranged("hybrid rows", {"expert_row": ((local,), np.int32)})(rows)
        limit = NO_LIMIT if self.limit is None else self.limit
        more = dict(num_rows=limit, pad_multiple=self.pad)
        staged = [self.staged] * len(self.kept) if expanding is None else self.expanded
        calls = self.rank_calls(kernel, [values | more for values in staged])
        blocks = [n if expanding is None else n + limit for n in self.num_tokens]
        self.parts = [(call, call.of(n)) for call, n in zip(calls, blocks)]
        if expanding is None:
            self.expanding = self.rank_calls(expand_kernel(self.shape), self.expanded)

    def _needs(self, tokens):
        return needs(self.buffer.n_ranks * tokens, self.shape.row_bytes, self.local)

    def start(self, given, group):
        """Launch: dispatched_hidden, probs, scales, tokens_per_expert of each rank, and the handle."""
        buffer, limit, numbers, columns = self.buffer, self.limit, self.numbers, []
        launches, loans, scratch, of_handle, outs = [], [], [], [], []
        out, results = (None, None) if limit is None else self.of(limit)
        for i, (call, launch) in enumerate(self.parts):
            words, addresses, lend = launch.words, given[i][0], call.r.arena.lend
            for word, address in enumerate(addresses, X):  # x, ids, probs
                words[word] = address
            rows, kept, slots = lend(self.rows), lend(self.kept[i]), lend(self.scratch[i])
            borrowed = *rows.piece.words, *kept.piece.words, *slots.piece.words
            if self.is_one_launch:
                outs.append(lend(out))
                borrowed = *borrowed, *outs[i].piece.words
            for at_words, run in borrowed:
                words[at_words] = run
            launches.append(launch)
            loans.append((rows, kept))
            scratch.append(slots)
            of_handle.append((*kept.piece.kept, *rows.piece.words))
        if self.is_one_launch:
            buffer.start(launches, (loans, scratch, outs))
            made = list(map(results, outs))
        else:
            told = buffer.start_and_hear(launches, self.local)
            if not told[0].has_room:
                loans, of_handle = self._sent_again(launches, loans)
            num_rows = numbers.num_rows if limit is not None else [t.padded_rows for t in told]
            numbers = self._numbers(num_rows)
            made = self.rows_of_experts((), of_handle, num_rows, self.pad)
        for i, (x, *more) in enumerate(made):
            if limit is None:
                per_expert = self.interface.told(told[i].tokens_per_expert)
            else:
                (per_expert,) = self.per_expert[i](loans[i][1])
            probs = more.pop(0) if self.shape.has_probs else None
            columns.append((x, probs, more[0] if more else None, per_expert))
        form = self.form, numbers.capacity
        return columns, HybridHandle(self, loans, of_handle, group, form, numbers)

    def _sent_again(self, launches, loans):
        """The handle's memory and words, of rows that are sent once more: every rank has seen that there was no room, and
        comes to the same number of tokens here.
        """
        self._prepare(resend_kernel(self.shape))
        again, made, of_handle = [], [], []
        for (call, launch), earlier, (_, kept) in zip(self.parts, launches, loans):
            again.append(call.like(launch, earlier))
            rows = call.r.arena.lend(self.rows)
            for at_words, run in rows.piece.words:
                launch.words[at_words] = run
            made.append((rows, kept))
            of_handle.append((*kept.piece.kept, *rows.piece.words))
        self.buffer.start(again)
        return made, of_handle


class CachedPlan(ExpandingPlan):
    """Cached dispatches: the tokens x [T, H] as rows of experts, as an earlier one placed them. options: num_sms."""

    def __init__(self, buffer, interface, names, arrays, options, handle):
        (x,), (num_sms,), capacity = arrays, options, handle.capacity
        xs = arguments.hidden_rows(buffer, names[0], x, dtypes=TYPES, n_rows=handle.num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        facts = dict(call="the gradient of hybrid_ep_combine", hidden=hidden, dtype=str(dtype))
        super().__init__(buffer, interface, names, handle.num_tokens, num_sms, **facts)
        row_bytes, local = hidden * dtype.itemsize, handle.sums["n_local_experts"]
        buffer.want_pool(self.facts, needs(capacity, row_bytes, 0))
        shape = buffer.launches.shape(local, row_bytes, num_sms, expands=True)
        self.expect_results(shape, hidden, dtype)
        self.stage(capacity, 0)
        self.expanding = self.rank_calls(resend_kernel(shape), self.expanded)

    def start(self, given, handle):
        """Launch: rows of experts [P, H] of each rank, of x's dtype. Beside them, None: there is no new handle."""
        pad, num_rows = handle.pad_multiple, handle.num_rows
        return self.rows_of_experts(given, handle.words, num_rows, pad), None


HybridHandle.CACHED = CachedPlan
