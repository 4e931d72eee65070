"""HybridEPDispatch and HybridEPCombine on a Buffer: a row for each (token, local expert), grouped by expert.

A token travels once to a rank and is expanded there, in the staging area's order; on the way back each rank sums its
experts' rows first. Results are a rank's own memory, so no call needs room that another may lack. What follows from
shapes, types and options alone is a plan, as in rows.py.
"""

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.expanding import RESULTS, ExpertRows, StagingArea, staged_bytes
from epmoe.fused_a2a.launches import RankCall, at, handle_memory, places
from epmoe.fused_a2a.returning import ReturnPlan
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import dispatch_kernel, expand_kernel, resend_kernel
from epmoe.kernels.rows.send import fp8_format
from epmoe_ref.errors import EPValueError

TYPES = (BF16, FP16)
ARGUMENTS = "x", "routing_map", "probs"
TAKES = tuple(map(at, ("x", "ids", "probs")))
N_ROWS, PAD = at("num_rows"), at("pad_multiple")
KEPT = {
    name: name for name in ("counts", "row_of", "expert_rows", "expert_base")
}  # what later calls read
WRITTEN = KEPT | {n: n for n in ("info", "tokens_per_expert", "overflow")}
SCRATCH = {name: name for name in ("slot_of",)}
EXPERT_ROW = {"expert_row": "expert_row"}
NO_LIMIT = 2**31 - 1


class HybridHandle:
    """The routing of one HybridEPDispatch.forward, for any number of combines and cached dispatches.

    It depends on the routing map and the options alone. num_tokens, num_rows: T and P of each rank of this process.
    overflow: int32 [1], 1 if the padded rows did not all fit into P; with a LocalWorld a list over ranks. It is
    handle[-1] too, as in the tuple that upstream's handle is, and a tensor there under torch. capacity: rows that a rank
    receives before they are expanded, or gets back, at most. memory: as in a RowsHandle, two Loans a rank.
    """

    is_exact = True  # as in a RowsHandle

    def __init__(self, plan, num_rows, capacity, memory, group, result):
        self.num_local_experts, self.num_tokens = plan.local, plan.num_tokens
        self.pad_multiple, self.p2p_world_size, self.num_sms = plan.pad, plan.a_world, plan.num_sms
        self.num_rows, self.capacity, self._result = num_rows, capacity, result
        self.memory, self.group, self._is_list = memory, group, plan.buffer.world_has_lists
        self.form, self.most_returned = (plan.form, capacity), capacity

    @property
    def overflow(self):
        """The flag of each rank here, or this rank's own."""
        loans = [loan for (loan, _), _ in self.memory]
        flags = [self._result(loan, loan.fields["overflow"]) for loan in loans]
        return flags if self._is_list else flags[0]

    def __getitem__(self, index):
        if index != -1:
            raise IndexError(
                f"handle[{index}]: a handle is opaque but for handle[-1], the overflow flag"
            )
        return self.overflow


class DispatchPlan:
    """Dispatches of these shapes and options. arrays: ARGUMENTS of HybridEPDispatch.forward.

    options: num_local_experts, num_permuted_tokens, pad_multiple, fp8_dispatch, p2p_world_size, num_sms of dispatch and
    combine.
    """

    of_handle = False  # nothing but options and the forms of arrays decides what plan is found

    def __init__(self, buffer, names, arrays, options, group):
        x, routing_map, *probs = arrays
        (
            num_local_experts,
            num_permuted_tokens,
            pad_multiple,
            fp8_dispatch,
            p2p_world_size,
            self.num_sms,
        ) = options
        self.buffer, num_sms, world = buffer, self.num_sms, buffer.world
        arguments.ranks_that_fit(world.n_ranks)
        self.local = local = arguments.local_experts(num_local_experts, world.n_ranks)
        self.pad = arguments.padding(pad_multiple, local)
        self.limit = limit = (
            None
            if num_permuted_tokens is None
            else arguments.rows("num_permuted_tokens", num_permuted_tokens)
        )
        self.a_world = (
            world.n_ranks
            if p2p_world_size is None
            else arguments.whole("p2p_world_size", p2p_world_size, 1)
        )
        if world.n_ranks % self.a_world:
            raise EPValueError(f"p2p_world_size={self.a_world} must divide n_ranks={world.n_ranks}")
        xs = arguments.hidden_rows(buffer, "x", x, dtypes=TYPES)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        if fp8_dispatch and (dtype != BF16 or hidden % FP8_GROUP):
            raise EPValueError(
                f"fp8_dispatch=True needs bfloat16 rows of a multiple of {FP8_GROUP} elements; x is {dtype} "
                f"with {hidden} columns"
            )
        self.num_tokens = num_tokens = [a.shape[0] for a in xs]
        self.form = local, tuple(num_tokens), self.a_world
        of_all = dict(
            n_rows=num_tokens,
            n_columns=local * world.n_ranks,
            because=f": n_ranks={world.n_ranks} times num_local_experts={local}",
        )
        arguments.matrices(buffer, "routing_map", routing_map, dtypes=(np.dtype(bool),), **of_all)
        has_probs = bool(probs)
        if has_probs:
            arguments.matrices(buffer, "probs", *probs, dtypes=(FP32,), **of_all)
        self.facts = facts = dict(
            call="hybrid_ep_dispatch",
            hidden=hidden,
            dtype=str(dtype),
            num_local_experts=local,
            has_probs=has_probs,
            fp8_dispatch=bool(fp8_dispatch),
            has_num_permuted_tokens=limit is not None,
        )
        buffer.want_experts(local, facts)
        row_bytes = fp8_format(hidden).token_size if fp8_dispatch else hidden * dtype.itemsize
        self.shape = shape = buffer.launches.shape(
            local,
            row_bytes,
            to_expand=num_tokens,
            has_probs=has_probs,
            has_meta=True,
            value_bytes=hidden if fp8_dispatch else 0,
            scale_words=hidden // FP8_GROUP if fp8_dispatch else 0,
            encode=bool(fp8_dispatch),
        )
        if buffer.knows_all_ranks or limit is not None and buffer.max_tokens:
            # without a look at the device, a batch larger than any before is taken to be that large on all ranks
            buffer.want_tokens(max(num_tokens))
        self.results = ExpertRows(shape, hidden, E4M3 if fp8_dispatch else dtype)
        n_ranks = buffer.n_ranks
        self.of_handle = [
            handle_memory(
                "hybrid handle",
                n_ranks,
                {
                    "tokens_per_expert": ((local,), np.int64),
                    "overflow": ((1,), np.int32),
                    "expert_base": ((n_ranks, local), np.int32),
                    "expert_rows": ((2, local), np.int32),
                    "row_of": ((n, n_ranks), np.int32),
                },
            )
            for n in num_tokens
        ]
        scratch = [
            Arrangement("rows scratch", {"slot_of": ((n, shape.num_experts), np.int32)})
            for n in num_tokens
        ]
        # one launch does it all where the host need not know the number of rows
        self.is_one_launch = limit is not None and (buffer.knows_all_ranks or buffer.max_tokens > 0)
        lent = [[(of, WRITTEN), (more, SCRATCH)] for of, more in zip(self.of_handle, scratch)]
        if self.is_one_launch:
            shape = buffer.launches.expanding(
                shape, num_tokens, buffer.launches.are_all(num_sms[0])
            )
            lent = [[*of, (self.results.of(limit)[0], RESULTS)] for of in lent]
        given = dict(takes=TAKES, names=names)
        more = [dict(lent=of, **given) for of in lent]
        self._prepare(dispatch_kernel(shape), more, shape if self.is_one_launch else None)
        if not self.is_one_launch:
            buffer.prepare_to_be_told(local)

    def _prepare(self, kernel, of_ranks, expanding=None):
        """RankCalls of a kernel that sends, for the most tokens so far; of_ranks: what each rank's takes besides.

        expanding: the shape of a kernel that expands the rows as well.
        """
        buffer, n_ranks, row_bytes = self.buffer, self.buffer.n_ranks, self.shape.row_bytes
        more = {} if expanding is None else buffer.launches.window_bytes(expanding)

        def needs(tokens):
            rows = n_ranks * tokens
            staged = staged_bytes(rows, row_bytes, self.local)
            return dict(staging_bytes=staged, flag_rows=rows, **more)

        # else the first call asks the ranks for their tokens
        if buffer.knows_all_ranks or buffer.max_tokens:
            buffer.want_pool_for_tokens(self.facts, needs)
        rows = n_ranks * buffer.max_tokens
        self.staged = staged = StagingArea(buffer, rows, row_bytes, self.local)
        of_rows = Arrangement("hybrid rows", {"expert_row": ((rows, self.local), np.int32)})
        self.places = [(places(of, KEPT), places(of_rows, EXPERT_ROW)) for of in self.of_handle]
        limit = NO_LIMIT if self.limit is None else self.limit
        self.calls, self.expanding = [], None
        for r, n, of in zip(buffer.ranks, self.num_tokens, of_ranks):
            values = staged.expanded(buffer, r) if expanding is not None else staged.values
            values = values | dict(num_rows=limit, pad_multiple=self.pad)
            n_rows = n if expanding is None else n + limit
            of = of | dict(lent=[(of_rows, EXPERT_ROW), *of.get("lent", ())])
            self.calls.append(RankCall(buffer, r, kernel, n, self.num_sms[0], n_rows, values, **of))

    def start(self, given, group, interface):
        """Launch: (dispatched_hidden, probs, scales, tokens_per_expert) of each rank, and the handle of all."""
        buffer, launches, lent = self.buffer, [], []
        result, is_exact = interface.result, self.limit is None
        if not self.is_one_launch:
            buffer.expect_no_capture(
                "hybrid_ep_dispatch", "give num_permuted_tokens, and call it once before"
            )
        for call, arrays in zip(self.calls, given):
            launch, loans = call.begin(arrays)
            launches.append(launch)
            lent.append(loans)
        told = buffer.start(launches, None if self.is_one_launch else self.local)
        num_rows, rows = [self.limit] * len(launches), [loans[0] for loans in lent]
        if told is not None:
            if not told[0].has_room:
                rows = self._send_again(launches)
            if is_exact:
                num_rows = [one.padded_rows for one in told]
        memory = [
            ((loans[1], kept), (of_rows, of_row))
            for loans, of_rows, (kept, of_row) in zip(lent, rows, self.places)
        ]
        if told is None:
            made = [loans[3] for loans in lent]
        else:
            made = self._expanded(memory, num_rows)
        if is_exact:
            per_expert = [interface.told(one.tokens_per_expert) for one in told]
        else:
            fields = [plan.fields["tokens_per_expert"] for plan in self.of_handle]
            per_expert = [result(loans[1], field) for loans, field in zip(lent, fields)]
        results = [(*self.results.arrays(out, result), n) for out, n in zip(made, per_expert)]
        # a rank with more tokens than any before gets more rows back than there was room for where they were received
        capacity = buffer.n_ranks * buffer.max_tokens
        return results, HybridHandle(self, num_rows, capacity, memory, group, result)

    def _send_again(self, launches):
        """Loans of places of experts' rows, of rows that are sent once more: every rank has seen that there was no room,
        and comes to the same number of tokens here.
        """
        self._prepare(resend_kernel(self.shape), [{}] * len(launches))
        again = [call.begin_like(launch) for call, launch in zip(self.calls, launches)]
        self.buffer.start([launch for launch, _ in again])
        return [loans[0] for _, loans in again]

    def _expanded(self, memory, num_rows):
        """Loans of rows of experts, made of what has come into the staging area. memory: of the handle."""
        buffer, made, launches = self.buffer, [], []
        if self.expanding is None:
            self.expanding = _calls_that_expand(self, expand_kernel(self.shape), self.staged)
        for call, of_rank, n, n_rows in zip(self.expanding, memory, self.num_tokens, num_rows):
            launch, loan = _expanding(call, (), of_rank, n, n_rows, self.results)
            made.append(loan)
            launches.append(launch)
        buffer.start(launches)
        return made


def _calls_that_expand(plan, kernel, staged, **more):
    """The RankCalls of a kernel that expands rows out of the staging area."""
    return [
        RankCall(
            plan.buffer,
            r,
            kernel,
            n,
            plan.num_sms[0],
            None,
            staged.expanded(plan.buffer, r),
            **more,
        )
        for r, n in zip(plan.buffer.ranks, plan.num_tokens)
    ]


def _expanding(call, given, memory, n, n_rows, results):
    """(a launch that makes n_rows rows of experts of n tokens, the Loan that they come to). results: ExpertRows."""
    arrangement, at_words = results.of(n_rows)
    loan = call.buffer.lend(call.r.arena, arrangement)
    launch, _ = call.begin(given, (*memory, (loan, at_words)), n + n_rows)
    launch.words[N_ROWS] = n_rows
    return launch, loan


def same_pad(pad_multiple, handle):
    """Nothing, if pad_multiple is what the handle has."""
    if (arguments.whole("pad_multiple", pad_multiple, 0) or 1) != handle.pad_multiple:
        raise EPValueError(
            f"pad_multiple={pad_multiple}, the handle has {handle.pad_multiple}: leave it out, or give "
            "what the dispatch was given"
        )


class CachedPlan:
    """Cached dispatches: the tokens x [T, H] as rows of experts, as an earlier one placed them. options: num_sms."""

    of_handle, rows_vary = True, False  # as of a ReturnPlan

    def __init__(self, buffer, names, arrays, options, handle):
        (x,), self.buffer, self.num_sms = arrays, buffer, options
        capacity, self.num_tokens = handle.capacity, handle.num_tokens
        xs = arguments.hidden_rows(buffer, names[0], x, dtypes=TYPES, n_rows=self.num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        row_bytes = hidden * dtype.itemsize
        self.facts = dict(call="the gradient of hybrid_ep_combine", hidden=hidden, dtype=str(dtype))
        buffer.want_pool(
            self.facts, staging_bytes=staged_bytes(capacity, row_bytes, 0), flag_rows=capacity
        )
        shape = buffer.launches.shape(handle.num_local_experts, row_bytes, expands=True)
        self.results = ExpertRows(shape, hidden, dtype)
        staged, given = StagingArea(buffer, capacity, row_bytes, 0), dict(takes=TAKES, names=names)
        self.calls = _calls_that_expand(self, resend_kernel(shape), staged, **given)

    def start(self, given, handle, interface):
        """Launch: rows of experts [P, H] of each rank, of x's dtype."""
        made, launches = [], []
        for call, arrays, memory, n, n_rows in zip(
            self.calls, given, handle.memory, self.num_tokens, handle.num_rows
        ):
            launch, loan = _expanding(call, arrays, memory, n, n_rows, self.results)
            launch.words[PAD] = handle.pad_multiple
            made.append(loan)
            launches.append(launch)
        self.buffer.start(launches)
        return [interface.result(loan, loan.fields["x"]) for loan in made]


class CombinePlan(ReturnPlan):
    """Sums of rows x [P, H] over experts, ranks and worlds, and probs [P] back in their places [T, E]. options: num_sms."""

    def __init__(self, buffer, names, arrays, options, handle):
        (x, *probs), (num_sms,), local = arrays, options, handle.num_local_experts
        xs = arguments.hidden_rows(buffer, names[0], x, dtypes=TYPES, n_rows=handle.num_rows)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        for of_ranks in probs:
            arguments.vectors(buffer, names[1], of_ranks, handle.num_rows)
        shape = buffer.launches.shape(
            local,
            hidden * dtype.itemsize,
            to_combine=handle.num_tokens,
            has_probs=bool(probs),
            dtype=arguments.NAMES[dtype],
            p2p_world_size=handle.p2p_world_size,
        )
        n_experts = buffer.world.n_ranks * local
        super().__init__(buffer, shape, names, hidden, dtype, handle.num_tokens, n_experts, num_sms)
