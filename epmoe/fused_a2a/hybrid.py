"""HybridEPDispatch on a Buffer: a row for each (token, local expert), grouped by expert.

A token travels once to a rank and is expanded there, in the staging area's order; on the way back each rank sums its
experts' rows first. Results are a rank's own memory, so no call needs room that another may lack.
"""

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.launches import at
from epmoe.fused_a2a.plans import NO_ROOM, NOTHING, Plan, arranged, handle_memory, places
from epmoe.host.lending import Arrangement, arrange
from epmoe.kernels.rows import dispatch_kernel, expand_kernel, resend_kernel
from epmoe.kernels.rows.send import expert_masks, fp8_format
from epmoe_ref.errors import EPValueError

TYPES = (BF16, FP16)
ARGUMENTS = "x", "routing_map", "probs"
N_ROWS, PAD = at("num_rows"), at("pad_multiple")
KEPT = "counts", "row_of", "expert_rows", "expert_base"  # what later calls read of a handle
NO_LIMIT = 2**31 - 1


class HybridHandle:
    """The routing of one HybridEPDispatch.forward, for any number of combines and cached dispatches.

    It depends on the routing map and the options alone. num_tokens, num_rows: T and P of each rank of this process.
    overflow: int32 [1], 1 if the padded rows did not all fit into P; with a LocalWorld a list over ranks. It is
    handle[-1] too, as in the tuple that upstream's handle is, and a tensor there under torch. capacity: rows that a rank
    receives before they are expanded, or gets back, at most. memory: two (Loan, places) of each rank. form, summed, sums,
    probs_a_row: for plans of later calls.
    """

    is_exact, summed, probs_a_row = True, TYPES, 0

    def __init__(self, plan, num_rows, capacity, memory, group, results):
        self.num_tokens, self.num_rows, self.num_sms = plan.num_tokens, num_rows, plan.num_sms_of
        self.pad_multiple, self.sums, self.group = plan.pad, plan.sums, group
        self.capacity = self.most_returned = capacity
        self.memory, self._results, self._is_list = memory, results, plan.buffer.world_has_lists
        self.form = plan.form, capacity

    @property
    def overflow(self):
        """The flag of each rank here, or this rank's own."""
        loans = [loan for (loan, _), _ in self.memory]
        flags = [self._results(loan, [loan.fields["overflow"]])[0] for loan in loans]
        return flags if self._is_list else flags[0]

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

    TAKES = tuple(map(at, ("x", "ids", "probs")))

    def expect_results(self, shape, hidden, dtype):
        """Prepare for results of this kind: of(rows) tells their Arrangement and places."""
        self.shape, of_row = shape, {"out": ((hidden,), dtype)}
        if shape.has_probs:
            of_row["out_probs"] = (), FP32
        if shape.scale_words:
            of_row["out_scales"] = (shape.scale_words,), FP32
        self.of = arranged("hybrid result", of_row)

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

    def rows_of_experts(self, given, handle_memory, num_rows, pad):
        """Loans of so many rows of experts, made of what has come into the staging area, or comes now: launches."""
        launches, made = [], []
        for call, arrays, memory, n, n_rows in zip(
            self.expanding, given, handle_memory, self.num_tokens, num_rows
        ):
            launch, (loan,) = call.begin(arrays, memory, n + n_rows, self.of(n_rows))
            launch.words[N_ROWS], launch.words[PAD] = n_rows, pad
            made.append(loan)
            launches.append(launch)
        self.buffer.start(launches)
        return made


class DispatchPlan(ExpandingPlan):
    """Dispatches of these shapes and options. arrays: ARGUMENTS of HybridEPDispatch.forward.

    options: num_local_experts, num_permuted_tokens, pad_multiple, fp8_dispatch, p2p_world_size, num_sms of dispatch and
    combine.
    """

    of_handle = False

    def __init__(self, buffer, names, arrays, options, group):
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
        num_tokens, self.limit = [a.shape[0] for a in xs], limit
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
        of_handle = {
            "tokens_per_expert": ((local,), np.int64),
            "overflow": ((1,), np.int32),
            "expert_base": ((n_ranks, local), np.int32),
            "expert_rows": ((2, local), np.int32),
        }
        self.kept = [
            handle_memory(
                "hybrid handle", n_ranks, of_handle | {"row_of": ((n, n_ranks), np.int32)}
            )
            for n in num_tokens
        ]
        scratch = [
            Arrangement("rows scratch", {"row_of_expert": ((n, shape.num_experts), np.int32)})
            for n in num_tokens
        ]
        # one launch does it all where the host need not know the number of rows
        self.is_one_launch = limit is not None and (buffer.knows_all_ranks or buffer.max_tokens > 0)
        lent = [[kept, more] for kept, more in zip(self.kept, scratch)]
        if self.is_one_launch:
            shape = buffer.launches.expanding(shape, num_tokens, num_sms)
            lent = [[*of_rank, self.of(limit)[0]] for of_rank in lent]
        else:
            buffer.prepare_to_be_told(local)
        self._prepare(dispatch_kernel(shape), lent, shape if self.is_one_launch else None)

    def _prepare(self, kernel, lent, expanding=None):
        """RankCalls of a kernel that sends, for the most tokens so far. lent: of each rank, besides places of rows.

        expanding: the shape of a kernel that expands the rows as well.
        """
        buffer, local = self.buffer, self.local
        # else the first call asks the ranks for their tokens
        if buffer.knows_all_ranks or buffer.max_tokens:
            buffer.want_pool(self.facts, self._needs, expanding)
        rows = buffer.n_ranks * buffer.max_tokens
        self.stage(rows, local)
        of_rows = Arrangement("hybrid rows", {"expert_row": ((rows, local), np.int32)})
        self.places = [(places(kept, names=KEPT), places(of_rows)) for kept in self.kept]
        limit = NO_LIMIT if self.limit is None else self.limit
        more = dict(num_rows=limit, pad_multiple=self.pad)
        staged = [self.staged] * len(lent) if expanding is None else self.expanded
        self.calls = self.rank_calls(
            kernel,
            n_rows=[n if expanding is None else n + limit for n in self.num_tokens],
            values=[values | more for values in staged],
            lent=[[of_rows, *of_rank] for of_rank in lent],
        )
        if not self.is_one_launch:
            self.expanding = self.rank_calls(expand_kernel(self.shape), values=self.expanded)

    def _needs(self, tokens):
        return needs(self.buffer.n_ranks * tokens, self.shape.row_bytes, self.local)

    def start(self, given, group, interface):
        """Launch: dispatched_hidden, probs, scales, tokens_per_expert, and the handle."""
        buffer, results, launches, lent, made = self.buffer, interface.results, [], [], []
        if buffer.is_captured and not self.is_one_launch:
            remedy = "give num_permuted_tokens, and call it once before"
            buffer.refuse_capture("hybrid_ep_dispatch", remedy)
        for call, arrays in zip(self.calls, given):
            launch, loans = call.begin(arrays)
            launches.append(launch)
            lent.append(loans)
        num_rows, rows, told = [self.limit] * len(lent), [loans[0] for loans in lent], None
        if self.is_one_launch:
            buffer.start(launches)
        else:
            told = buffer.start_and_hear(launches, self.local)
            if not told[0].has_room:
                rows = self._send_again(launches)
            if self.limit is None:
                num_rows = [one.padded_rows for one in told]
        memory = [
            ((loans[1], kept), (of_rows, of_row))
            for loans, of_rows, (kept, of_row) in zip(lent, rows, self.places)
        ]
        if told is None:
            outs = [loans[3] for loans in lent]
        else:
            outs = self.rows_of_experts([NOTHING] * len(memory), memory, num_rows, self.pad)
        for i, (out, loans) in enumerate(zip(outs, lent)):
            x, *more = results(out, out.fields.values())
            probs = more.pop(0) if self.shape.has_probs else None
            if self.limit is None:
                per_expert = interface.told(told[i].tokens_per_expert)
            else:
                (per_expert,) = results(loans[1], [loans[1].fields["tokens_per_expert"]])
            made.append((x, probs, more[0] if more else None, per_expert))
        # a rank with more tokens than any before gets more rows back than there was room for where they were received
        capacity = buffer.n_ranks * buffer.max_tokens
        handle = HybridHandle(self, num_rows, capacity, memory, group, results)
        return made, handle

    def _send_again(self, launches):
        """Loans of places of experts' rows, of rows that are sent once more: every rank has seen that there was no room,
        and comes to the same number of tokens here.
        """
        self._prepare(resend_kernel(self.shape), [()] * len(launches))
        again = [call.begin_like(launch) for call, launch in zip(self.calls, launches)]
        self.buffer.start([launch for launch, _ in again])
        return [loans[0] for _, loans in again]


class CachedPlan(ExpandingPlan):
    """Cached dispatches: the tokens x [T, H] as rows of experts, as an earlier one placed them. options: num_sms."""

    def __init__(self, buffer, names, arrays, options, handle):
        (x,), (num_sms,), capacity = arrays, options, handle.capacity
        xs = arguments.hidden_rows(buffer, names[0], x, dtypes=TYPES, n_rows=handle.num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        facts = dict(call="the gradient of hybrid_ep_combine", hidden=hidden, dtype=str(dtype))
        super().__init__(buffer, names, handle.num_tokens, num_sms, **facts)
        row_bytes, local = hidden * dtype.itemsize, handle.sums["n_local_experts"]
        buffer.want_pool(self.facts, needs(capacity, row_bytes, 0))
        shape = buffer.launches.shape(local, row_bytes, num_sms, expands=True)
        self.expect_results(shape, hidden, dtype)
        self.stage(capacity, 0)
        self.expanding = self.rank_calls(resend_kernel(shape), values=self.expanded)

    def start(self, given, handle, interface):
        """Launch: rows of experts [P, H] of each rank, of x's dtype."""
        pad, num_rows = handle.pad_multiple, handle.num_rows
        made = self.rows_of_experts(given, handle.memory, num_rows, pad)
        return [interface.results(loan, loan.fields.values()) for loan in made], None
