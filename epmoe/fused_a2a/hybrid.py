"""HybridEPDispatch and HybridEPCombine on a Buffer: a row for each (token, local expert), grouped by expert.

A token travels once to a rank and is expanded there, in the staging area's order; on the way back each rank sums its
experts' rows first. Results are a rank's own memory, so no call needs room that another may lack. What follows from
shapes, types and options alone is a plan, as in rows.py.
"""

from contextlib import nullcontext

import numpy as np

from epmoe import device
from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.expanding import (
    ExpertRows,
    StagingArea,
    handle_values,
    result_values,
    staged_bytes,
    write_handle,
)
from epmoe.fused_a2a.handles import HybridHandle, counts_offset, info_words
from epmoe.fused_a2a.launches import FIELDS, at, words_of
from epmoe.fused_a2a.returning import ReturnPlan
from epmoe.fused_a2a.rows import told_by
from epmoe.host.arrays import seen
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import dispatch_kernel, expand_kernel, expert_bits, resend_kernel, windows
from epmoe.kernels.rows.senders import fp8_format
from epmoe_ref.errors import EPValueError

TYPES = (BF16, FP16)
X, IDS, PROBS = at("x", "ids", "probs")
# (field of the block, array) of what is lent to a dispatch: its handle, scratch, places of rows, results
LENT = (
    [(name, name) for name in ("info", "tokens_per_expert", "overflow", "expert_base")]
    + [("expert_rows", "expert_rows"), ("row_of", "row_of")],
    [("slot_of", "slot_of"), ("encoded", "encoded")],
    [("expert_row", "expert_row")],
    [("out", "x"), ("out_probs", "probs"), ("out_scales", "scales")],
)
NO_LIMIT = 2**31 - 1


class DispatchPlan:
    """Dispatches of these shapes and options; arguments: HybridEPDispatch.forward."""

    def __init__(
        self,
        buffer,
        x,
        routing_map,
        probs,
        num_local_experts,
        num_permuted_tokens,
        pad_multiple,
        fp8_dispatch,
        p2p_world_size,
        num_sms,
    ):
        self.buffer, self.num_sms, world = buffer, num_sms, buffer.world
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
        of_all = dict(
            n_rows=num_tokens,
            n_columns=local * world.n_ranks,
            because=f": n_ranks={world.n_ranks} times num_local_experts={local}",
        )
        maps = arguments.matrices(
            buffer, "routing_map", routing_map, dtypes=(np.dtype(bool),), **of_all
        )
        has_probs = not arguments.absent(probs)
        if has_probs:
            of_probs = arguments.matrices(buffer, "probs", probs, dtypes=(FP32,), **of_all)
        buffer.expect_open()
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
        self.scratch = [
            Arrangement(
                "rows scratch",
                {
                    "slot_of": ((n, shape.n_experts), np.int32),
                    "encoded": ((n, row_bytes if shape.encode else 0), np.uint8),
                },
            )
            for n in num_tokens
        ]
        self.of_handle = [
            Arrangement(
                "hybrid handle",
                {
                    "info": ((info_words(world.n_ranks),), np.int32),
                    "tokens_per_expert": ((local,), np.int64),
                    "overflow": ((1,), np.int32),
                    "expert_base": ((world.n_ranks, local), np.int32),
                    "expert_rows": ((2, local), np.int32),
                    "row_of": ((n, world.n_ranks), np.int32),
                },
            )
            for n in num_tokens
        ]
        launches, n_sms = buffer.launches, num_sms[0]
        self.expanding = launches.expanding(shape, num_tokens, launches.are_all(n_sms))
        self.kernel = dispatch_kernel(shape if limit is None else self.expanding)
        self.again, self.n_ranks, self.num_rows = None, world.n_ranks, [limit] * len(num_tokens)
        self.is_simple = all(a.host is None for a in (*xs, *maps, *(of_probs if has_probs else ())))
        self._staging = {}  # room in rows -> (StagingArea, Arrangement of expert_row)

    def start(self, xs, maps, probs, group):
        """Launch: (dispatched_hidden, probs, scales, tokens_per_expert) of each rank, and the handle of all."""
        buffer, limit = self.buffer, self.limit
        with buffer.letting_go() if device.SIM else nullcontext():
            loans = [buffer.lend(r.arena, of) for r, of in zip(buffer.ranks, self.of_handle)]
            scratch = [buffer.lend(r.arena, of) for r, of in zip(buffer.ranks, self.scratch)]
            given = self._given(xs, maps, probs, loans, scratch)
            if limit is not None and (buffer.knows_all_ranks or buffer.max_tokens):
                made = [buffer.lend(r.arena, self.results.of(limit)) for r in buffer.ranks]
                rows, _ = self._send(self.kernel, given, loans, made, self.expanding)
                per_expert = [loan.array("tokens_per_expert") for loan in loans]
                num_rows = self.num_rows
                if buffer.is_alone and self.is_simple and self.again is None:
                    staged, of_rows = self._staged()
                    lent = self.of_handle[0], self.scratch[0], of_rows, self.results.of(limit)
                    same = staged.values | staged.sources(buffer, buffer.ranks[0])
                    same |= dict(n_rows=limit, pad=self.pad)
                    self.again = _Again(self, lent, same, self.num_tokens[0] + limit)
            else:
                kernel = self.kernel if limit is None else dispatch_kernel(self.shape)
                rows, staged = self._send(kernel, given, loans)
                told = told_by(buffer, loans)
                if not told[0].has_room:
                    # every rank has seen it, and comes to the same number of tokens here
                    rows, staged = self._send(resend_kernel(self.shape), given, loans)
                is_exact = limit is None
                num_rows = [one.padded_rows if is_exact else limit for one in told]
                made = self._expanded(staged, list(zip(loans, rows)), num_rows)
                per_expert = [
                    one.tokens_per_expert if is_exact else loan.array("tokens_per_expert")
                    for one, loan in zip(told, loans)
                ]
            results = [(*self.results.arrays(out), n) for out, n in zip(made, per_expert)]
            overflow = [loan.array("overflow") for loan in loans]
        # a rank with more tokens than any before gets more rows back than there was room for where they were received
        return results, HybridHandle(
            self.local,
            self.num_tokens,
            num_rows,
            buffer.world.n_ranks * buffer.max_tokens,
            self.pad,
            self.a_world,
            overflow if buffer.world.lists else overflow[0],
            list(zip(loans, rows)),
            group,
            self.num_sms,
        )

    def _given(self, xs, maps, probs, loans, scratch):
        """The fields of the parameter block of each rank, but for where rows go."""
        place, given = self.buffer.placing.place, []
        for i, (r, loan, more) in enumerate(zip(self.buffer.ranks, loans, scratch)):
            at = loan.address
            given.append(
                dict(
                    x=place(r.rank, "x", xs[i]),
                    ids=place(r.rank, "routing_map", maps[i]),
                    probs=place(r.rank, "probs", probs[i]) if self.shape.has_probs else 0,
                    info=at("info"),
                    tokens_per_expert=at("tokens_per_expert"),
                    overflow=at("overflow"),
                    expert_base=at("expert_base"),
                    slot_of=more.address("slot_of"),
                    encoded=more.address("encoded"),
                    n_rows=NO_LIMIT if self.limit is None else self.limit,
                    pad=self.pad,
                )
            )
        return given

    def _staged(self):
        """(StagingArea, Arrangement of expert_row) for the most tokens so far."""
        buffer, rows = self.buffer, self.buffer.world.n_ranks * self.buffer.max_tokens
        key = rows, buffer.pool_layout
        if key not in self._staging:
            expert_row = {"expert_row": ((rows, self.local), np.int32)}
            self._staging[key] = (
                StagingArea(buffer, rows, self.shape.row_bytes, self.local),
                Arrangement("hybrid rows", expert_row),
            )
        return self._staging[key]

    def _send(self, kernel, given, loans, made=None, shape=None):
        """Launch; made: Loans of what is expanded as well, by the kernel of that shape.

        Returns (Loans of expert_row, the StagingArea).
        """
        buffer, n_ranks, row_bytes = self.buffer, self.buffer.world.n_ranks, self.shape.row_bytes
        of_few = (
            {}
            if shape is None
            else dict(
                window_bytes=windows.bytes_for(shape), bits_bytes=expert_bits.bytes_for(shape)
            )
        )

        def needs(tokens):
            rows = n_ranks * tokens
            staged = staged_bytes(rows, row_bytes, self.local)
            return dict(staging_bytes=staged, flag_rows=rows, **of_few)

        # else: the first call asks the ranks for their tokens
        if buffer.knows_all_ranks or buffer.max_tokens:
            self._want(needs, kernel)
        staged, of_rows = self._staged()
        rows = [buffer.lend(r.arena, of_rows) for r in buffer.ranks]
        calls = []
        for i, (r, values, of_rank, n) in enumerate(
            zip(buffer.ranks, given, zip(loans, rows), self.num_tokens)
        ):
            values = values | staged.values | handle_values(buffer, of_rank)
            if made is not None:
                values |= staged.sources(buffer, r) | result_values(made[i])
            calls.append((r.rank, words_of(values), n, n + (self.limit if made else 0)))
        buffer.launch_all(kernel, calls, self.num_sms[0])
        return rows, staged

    def _want(self, needs, kernel):
        """Room in the pool; looked at once for each kernel, layout, and most tokens."""
        buffer = self.buffer
        key = kernel, buffer.max_tokens, buffer.pool_layout
        if key != self.__dict__.get("_wanted"):
            buffer.want_pool_for_tokens(self.facts, needs)
            self._wanted = kernel, buffer.max_tokens, buffer.pool_layout

    def _expanded(self, staged, loans, num_rows):
        """Loans of rows of experts, made of what has come into the staging area."""
        buffer, shape = self.buffer, self.shape
        made, calls = [], []
        for r, of_rank, rows, n in zip(buffer.ranks, loans, num_rows, self.num_tokens):
            made.append(buffer.lend(r.arena, self.results.of(rows)))
            values = (
                staged.values
                | staged.sources(buffer, r)
                | handle_values(buffer, of_rank)
                | result_values(made[-1])
                | dict(expert_base=of_rank[0].address("expert_base"), n_rows=rows)
            )
            calls.append((r.rank, words_of(values), n, n + rows))
        buffer.launch_all(expand_kernel(shape), calls, self.num_sms[0])
        return made


class _Again:
    """What a dispatch without a wait does once more, where a process has one rank, with arrays in GPU memory."""

    def __init__(self, plan, arrangements, values, n_rows):
        """arrangements: of handle, scratch, expert_row, results; values: fields that do not differ."""
        self.plan, self.buffer, (self.r,), (n,) = (
            plan,
            plan.buffer,
            plan.buffer.ranks,
            plan.num_tokens,
        )
        self.words, self.capacity = words_of(values), plan.n_ranks * plan.buffer.max_tokens
        handle = arrangements[0]
        # (arrangement, [(index of a word, offset in the loan)])
        self.lent = [
            (one, [(FIELDS[field][0], one.fields[name].offset) for field, name in names])
            for one, names in zip(arrangements, LENT)
        ]
        self.lent[0][1].append(
            (FIELDS["counts"][0], handle.fields["info"].offset + counts_offset(plan.n_ranks))
        )
        results = plan.results
        self.names = [
            name
            for name, has in zip(
                ("x", "probs", "scales"), (True, results.shape.has_probs, results.shape.scale_words)
            )
            if has
        ]
        kernel, n_sms = plan.kernel, plan.num_sms[0]
        self.launch = self.buffer.find(kernel, self.r.rank, n, None, n_sms, n_rows)

    def start(self, x, routing_map, probs, group):
        """As DispatchPlan.start of one rank's arrays."""
        plan, buffer, arena, words, loans = self.plan, self.buffer, self.r.arena, self.words[:], []
        for arrangement, places in self.lent:
            loan = arena.lend(arrangement)
            base = loan.base
            for i, offset in places:
                words[i] = base + offset
            loans.append(loan)
        if buffer.is_captured:
            arena.captured += loans
        words[X], words[IDS] = x.address, routing_map.address
        if probs is not None:
            words[PROBS] = probs.address
        self.launch.start(*words)
        buffer.kept = x, routing_map, probs
        of_handle, _, rows, made = loans
        arrays = dict(zip(self.names, made.arrays(self.names)))
        per_expert, overflow = of_handle.arrays(("tokens_per_expert", "overflow"))
        handle = HybridHandle(
            plan.local,
            plan.num_tokens,
            plan.num_rows,
            self.capacity,
            plan.pad,
            plan.a_world,
            overflow,
            [(of_handle, rows)],
            group,
            plan.num_sms,
        )
        return [(arrays["x"], arrays.get("probs"), arrays.get("scales"), per_expert)], handle


def _known(buffer, x, routing_map, probs, options, group):
    """The results of a dispatch like one before, launched, or None if there was none."""
    x, routing_map, of_probs = seen(x), seen(routing_map), None
    if x is None or routing_map is None:
        return None
    at, form = x.address | routing_map.address, None
    if probs is not None:
        of_probs = seen(probs)
        if of_probs is None:
            return None
        at, form = at | of_probs.address, of_probs.form
    if at % arguments.VECTOR:
        return None
    plan = buffer.known(("hybrid dispatch", x.form, routing_map.form, form, *options))
    return plan and plan.again and plan.again.start(x, routing_map, of_probs, group)


def dispatch(buffer, x, routing_map, probs, *options, group=None):
    """Send every token to each of its experts, rows grouped by expert: see DispatchPlan for the options.

    Of each rank of this process, as lists: (dispatched_hidden, dispatched_probs, dispatched_scaling_factor,
    tokens_per_expert); and the handle of all.
    """
    if arguments.absent(probs):
        probs = None
    if buffer.is_alone:
        made = _known(buffer, x, routing_map, probs, options, group)
        if made is not None:
            return made
    xs, x_form = arguments.look(buffer, "x", x)
    maps, map_form = arguments.look(buffer, "routing_map", routing_map)
    of_probs, probs_form = arguments.look(buffer, "probs", probs)
    plan = buffer.plan(
        ("hybrid dispatch", x_form, map_form, probs_form, *options),
        lambda: DispatchPlan(buffer, x, routing_map, probs, *options),
    )
    return plan.start(xs, maps, of_probs, group)


def same_pad(pad_multiple, handle):
    """Nothing, if pad_multiple is what the handle has."""
    if (arguments.whole("pad_multiple", pad_multiple, 0) or 1) != handle.pad_multiple:
        raise EPValueError(
            f"pad_multiple={pad_multiple}, the handle has {handle.pad_multiple}: leave it out, or give "
            "what the dispatch was given"
        )


class _CachedPlan:
    """Cached dispatches of tokens of this form, for handles of one form."""

    def __init__(self, buffer, name, x, handle, num_sms):
        self.buffer, self.name, self.num_sms = buffer, name, num_sms
        self.num_tokens, self.capacity = handle.num_tokens, handle.capacity
        xs = arguments.hidden_rows(buffer, name, x, dtypes=TYPES, n_rows=handle.num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        buffer.expect_open()
        row_bytes = hidden * dtype.itemsize
        self.facts = dict(call="the gradient of hybrid_ep_combine", hidden=hidden, dtype=str(dtype))
        buffer.want_pool(
            self.facts,
            staging_bytes=staged_bytes(self.capacity, row_bytes, 0),
            flag_rows=self.capacity,
        )
        self.staged = StagingArea(buffer, self.capacity, row_bytes, 0)
        self.shape = buffer.launches.shape(handle.num_local_experts, row_bytes, expands=True)
        self.results, self.kernel = ExpertRows(self.shape, hidden, dtype), resend_kernel(self.shape)

    def start(self, xs, handle):
        """Launch: rows of experts of each rank."""
        buffer, made, calls = self.buffer, [], []
        with buffer.letting_go() if device.SIM else nullcontext():
            for i, (r, loans, rows) in enumerate(zip(buffer.ranks, handle.loans, handle.num_rows)):
                made.append(buffer.lend(r.arena, self.results.of(rows)))
                values = (
                    self.staged.values
                    | handle_values(buffer, loans)
                    | self.staged.sources(buffer, r)
                    | dict(
                        x=buffer.placing.place(r.rank, self.name, xs[i]),
                        n_rows=rows,
                        pad=handle.pad_multiple,
                        out=made[i].address("x"),
                    )
                )
                n = self.num_tokens[i]
                calls.append((r.rank, words_of(values), n, n + rows))
            buffer.launch_all(self.kernel, calls, self.num_sms)
        return [loan.array("x") for loan in made]


def cached_dispatch(buffer, name, x, handle, num_sms=None):
    """The tokens x [T, H] as rows of experts, as an earlier dispatch placed them: a list of [P, H], of x's dtype."""
    xs, forms = arguments.look(buffer, name, x)
    plan = buffer.plan(
        ("hybrid cached", forms, handle.form, num_sms),
        lambda: _CachedPlan(buffer, name, x, handle, num_sms),
    )
    return plan.start(xs, handle)


class _CombinePlan(ReturnPlan):
    """Combines of rows of this form, for handles of one form."""

    write_handle = staticmethod(write_handle)

    def __init__(self, buffer, name, x, handle, probs, num_sms):
        local, has_probs = handle.num_local_experts, not arguments.absent(probs)
        xs = arguments.hidden_rows(buffer, name, x, dtypes=TYPES, n_rows=handle.num_rows)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        for i, r in enumerate(buffer.ranks if has_probs else ()):
            given = arguments.of_ranks(buffer, f"probs of {name}", probs)[i]
            p, rows = arguments.array(buffer, f"probs of {name}", r, given), handle.num_rows[i]
            if p.dtype != FP32 or p.shape != (rows,):
                raise EPValueError(
                    f"probs of {name} of rank {r.rank} is {p.dtype} {p.shape}, float32 ({rows},) is "
                    "needed"
                )
        buffer.expect_open()
        shape = buffer.launches.shape(
            local,
            hidden * dtype.itemsize,
            to_combine=handle.num_tokens,
            has_probs=has_probs,
            dtype=arguments.NAMES[dtype],
            p2p_world_size=handle.p2p_world_size,
        )
        n_experts = buffer.world.n_ranks * local
        super().__init__(buffer, shape, name, hidden, dtype, handle.num_tokens, n_experts, num_sms)


def combine(buffer, name, x, handle, probs=None, num_sms=None):
    """Sums of rows x [P, H] over experts, ranks and worlds, and probs [P] back in their places [T, E]: two lists."""
    key = "hybrid combine", handle.form, handle.num_rows[0]
    if probs is None and buffer.is_alone:
        made = ReturnPlan.known(buffer, key, x, handle, num_sms)
        if made is not None:
            return made
    known_by = key
    (xs, of_probs), key = ReturnPlan.seen(buffer, name, x, probs, handle)
    plan = buffer.plan(
        ("hybrid combine", key, handle.form, num_sms),
        lambda: _CombinePlan(buffer, name, x, handle, probs, num_sms),
    )
    made = plan.start(xs, of_probs, handle, handle.capacity)
    if probs is None and buffer.is_alone:
        plan.remember(known_by, xs[0], handle, handle.capacity)
    return made
