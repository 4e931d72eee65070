"""FusedDispatch and FusedCombine on a Buffer: a token travels once to a rank, however many of its experts are there.

Of each function what follows from shapes, types and options alone is a plan: its class. A call finds the plan, or makes
it, with all checks and all growing of memory; then it borrows memory, and launches.
"""

from contextlib import nullcontext

import numpy as np

from epmoe import device
from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32, VECTOR
from epmoe.fused_a2a.handles import RowsHandle, counts_offset, info_words
from epmoe.fused_a2a.launches import FIELDS, N_WORDS, at, words_of
from epmoe.fused_a2a.returning import ReturnPlan
from epmoe.host.arrays import seen
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows import dispatch_kernel, move_kernel, records, resend_kernel
from epmoe.kernels.rows.roles import blocks_for

RESULT = "rows result"
X, IDS, PROBS, SCALES, CAPACITY = at("x", "ids", "probs", "scales", "capacity")
INFO, COUNTS, ROW_OF, PER_EXPERT = at("info", "counts", "row_of", "tokens_per_expert")
PER_EXPERTS = ("tokens_per_expert",)
PLACES = ("x", "ids", "probs", "scales")  # order of the arrays of a result in a note


def _native(dtype):
    """The type in this machine's byte order, which kernels read."""
    return dtype.newbyteorder("=")


class _Received:
    """What is received: arrays of so many rows, in the pool's heap or, without room there, in the staging area."""

    def __init__(self, hidden, dtype, top_k=0, n_scales=0):
        self.hidden, self.dtype, self.top_k, self.n_scales = hidden, dtype, top_k, n_scales
        self.names = [n for n in PLACES if n in self._arrays(0)]
        self.places = [(FIELDS["places"][0] + PLACES.index(n), n) for n in self.names]
        self._arranged = None, None  # the latest

    def _arrays(self, rows):
        arrays = {"x": ((rows, self.hidden), self.dtype)}
        if self.top_k:
            arrays |= {"ids": ((rows, self.top_k), np.int64), "probs": ((rows, self.top_k), FP32)}
        if self.n_scales:
            arrays["scales"] = ((rows, self.n_scales), FP32)
        return arrays

    def of(self, rows):
        """The Arrangement of so many rows."""
        known, arrangement = self._arranged
        if known != rows:
            arrangement = Arrangement(RESULT, self._arrays(rows))
            self._arranged = rows, arrangement
        return arrangement

    def result(self, loan, n=None):
        """x or (x, scales), ids, probs, as far as there are any, cut to n rows."""
        x, *more = [loan.array(name, n) for name in self.names]
        return ((x, more.pop()) if self.n_scales else x), *more


class _Target:
    """Where one rank's result of a call is received: a loan of the pool's heap, or the staging area."""

    __slots__ = ("buffer", "r", "received", "capacity", "arrangement", "loan")

    def __init__(self, buffer, r, received, rows):
        self.buffer, self.r, self.received, self.capacity = buffer, r, received, rows
        self.arrangement = arrangement = received.of(rows)
        self.loan = buffer.lend(r.heap, arrangement)
        if self.loan is None and arrangement.nbytes > buffer.pool_layout.staging_bytes:
            self.capacity = -1  # no room at all: not even for zero rows, so that all ranks grow

    def write(self, words):
        """Enter it into the words of a launch."""
        if self.capacity < 0:
            words[CAPACITY] = 0xFFFFFFFF
            return
        start = self.buffer.pool_layout.staging_at if self.loan is None else self.loan.start
        fields, words[CAPACITY] = self.arrangement.fields, self.capacity
        for i, name in self.received.places:
            words[i] = start + fields[name].offset

    def settle(self, rows, stream):
        """Launch the move of so many rows out of the staging area; there is a loan afterwards."""
        buffer, r, names = self.buffer, self.r, self.received.names
        loan = self.loan = buffer.lend(r.arena, self.received.of(rows))
        fill, staged = [0] * (len(PLACES) - len(names)), buffer.staging(r)
        words = words_of(
            dict(
                sources=[staged + self.arrangement.fields[name].offset for name in names] + fill,
                targets=[loan.address(name) for name in names] + fill,
                word_counts=[loan.fields[name].nbytes // 4 for name in names] + fill,
            )
        )
        kernel = move_kernel(buffer.world.n_ranks, buffer.launches.threads)
        buffer.find(kernel, r.rank, 0, stream, None, rows).start(*words)


def _settled(buffer, targets, num_rows):
    """Results of each rank, cut to the exact rows: tuples (x or (x, scales), ids, probs), or of x alone."""
    if any([target.loan is None for target in targets]):
        with buffer.launching() as streams:
            for target, n in zip(targets, num_rows):
                if target.loan is None:
                    target.settle(n, streams[target.r.rank])
    return [target.received.result(target.loan, n) for target, n in zip(targets, num_rows)]


class DispatchPlan:
    """Dispatches of these shapes; on_device: as fused_dispatch_on_device says. Arguments: FusedDispatch.forward."""

    def __init__(self, buffer, x, token_indices, token_probs, num_experts, num_sms, on_device):
        self.buffer, self.num_sms, self.on_device = buffer, num_sms, on_device
        world = buffer.world
        arguments.ranks_that_fit(world.n_ranks)
        self.local = local = arguments.experts_per_rank(num_experts, world.n_ranks)
        self.num_experts = local * world.n_ranks
        xs, scales = arguments.values_and_scales(buffer, "x", x)
        self.num_tokens = num_tokens = [a.shape[0] for a in xs]
        ids = arguments.expert_indices(buffer, token_indices, num_tokens, self.num_experts)
        self.top_k, (_, hidden), dtype = ids[0].shape[1], xs[0].shape, xs[0].dtype
        of_probs = arguments.matrices(
            buffer,
            "token_probs",
            token_probs,
            dtypes=(FP32,),
            n_rows=num_tokens,
            n_columns=self.top_k,
        )
        arguments.distinct_ids(buffer, ids, self.num_experts)
        n_scales = scales[0].shape[1] if scales else 0
        buffer.expect_open()
        self.facts = facts = dict(
            call="fused_dispatch",
            hidden=hidden,
            dtype=str(dtype),
            num_experts=self.num_experts,
            top_k=self.top_k,
            has_scales=bool(n_scales),
            on_device=on_device,
        )
        buffer.want_experts(local, facts)
        self.received = received = _Received(hidden, dtype, self.top_k, n_scales)
        asks_for_results = buffer.knows_all_ranks or on_device
        if asks_for_results:
            # without a look at the device, a batch larger than any before is taken to be that large on all ranks
            buffer.want_tokens(max(num_tokens))
        wide = all(a.dtype.itemsize == 8 for a in ids)
        self.id_types = [_native(a.dtype) if wide else np.dtype(np.int32) for a in ids]
        self.shape = buffer.launches.shape(
            local,
            hidden * dtype.itemsize,
            to_send=num_tokens,
            by_all=buffer.launches.are_all(num_sms),
            top_k=self.top_k,
            id_bytes=8 if wide else 4,
            scale_words=n_scales,
            has_probs=True,
            has_meta=True,
        )

        def needs(tokens):
            return dict(
                staging_bytes=0,
                result_bytes=received.of(world.n_ranks * tokens).nbytes if asks_for_results else 0,
                **buffer.launches.window_bytes(self.shape),
            )

        buffer.want_pool_for_tokens(facts, needs)
        self.of_handle = [
            Arrangement(
                "rows handle",
                {
                    "info": ((info_words(world.n_ranks),), np.int32),
                    "tokens_per_expert": ((local,), np.int64),
                    "row_of": ((n, world.n_ranks), np.int32),
                },
            )
            for n in num_tokens
        ]
        self.kernel, self.n_ranks = dispatch_kernel(self.shape), world.n_ranks
        self.again, self.ranks = None, list(world.ranks)
        arrays = *xs, *ids, *of_probs
        is_int = all(a.dtype == t for a, t in zip(ids, self.id_types))
        self.is_simple = is_int and not n_scales and all(a.host is None for a in arrays)
        self.most_tokens, self.counts_at = max(num_tokens), counts_offset(world.n_ranks)
        fields = self.of_handle[0].fields
        self.info, self.per_expert = fields["info"].offset, fields["tokens_per_expert"].offset
        self.row_of = [of.fields["row_of"].offset for of in self.of_handle]
        if not device.SIM:  # arrays that need no conversion
            self.id_types = [None if a.dtype == t else t for a, t in zip(ids, self.id_types)]

    def start(self, xs, ids, probs, group):
        """Launch: results of each rank (recv_x, recv_token_indices, recv_token_probs, tokens_per_expert), the handle."""
        if not device.SIM:
            return self._start(xs, ids, probs, group)
        arguments.distinct_ids(self.buffer, ids, self.num_experts)
        with self.buffer.letting_go():
            return self._start(xs, ids, probs, group)

    def _start(self, xs, ids, probs, group):
        buffer, n_ranks = self.buffer, self.n_ranks
        loans, words = [], []
        for i, r in enumerate(buffer.ranks):
            loans.append(buffer.lend(r.arena, self.of_handle[i]))
            words.append(self._words(i, r.rank, loans[i], xs[i], ids[i], probs[i]))
        targets = self._launch(self.kernel, words, max(buffer.max_tokens, self.most_tokens))
        capacity, counts = n_ranks * buffer.max_tokens, None
        if not self.on_device:
            told = told_by(buffer, loans)
            capacity, counts = n_ranks * buffer.max_tokens, told[0].counts
            if not told[0].has_room:
                # every rank has seen the same counts, and comes to the same number here
                room = self.received.of(capacity).nbytes
                buffer.want_pool(self.facts, staging_bytes=0, result_bytes=room)
                targets = self._launch(resend_kernel(self.shape), words, buffer.max_tokens)
        handle = RowsHandle(
            self.ranks,
            self.num_experts,
            self.top_k,
            self.num_tokens,
            counts,
            loans,
            capacity,
            group,
        )
        made = _settled(buffer, targets, handle.num_rows)
        if self.on_device and buffer.is_alone and self.again is None and self.is_simple:
            self.again = _Again(self)
        for i, row in enumerate(made):
            row += (
                (loans[i].array("tokens_per_expert"),)
                if self.on_device
                else (told[i].tokens_per_expert,)
            )
            made[i] = row
        return made, handle

    def _words(self, i, rank, loan, x, ids, probs):
        """The words of a launch, but for where results go."""
        place, words, base = self.buffer.placing.place, [0] * N_WORDS, loan.base
        if type(x) is tuple:
            x, scales = x
            words[SCALES] = place(rank, "scales", scales)
        words[X] = place(rank, "x", x)
        words[IDS] = place(rank, "token_indices", ids, self.id_types[i])
        words[PROBS] = place(rank, "token_probs", probs)
        words[INFO], words[COUNTS], words[ROW_OF], words[PER_EXPERT] = (
            base + self.info,
            base + self.info + self.counts_at,
            base + self.row_of[i],
            base + self.per_expert,
        )
        return words

    def _launch(self, kernel, words, tokens):
        """Send, with room for results of so many tokens of each rank: the targets."""
        targets = [
            _Target(self.buffer, r, self.received, self.n_ranks * tokens) for r in self.buffer.ranks
        ]
        _send(self.buffer, kernel, self.shape, targets, words, self.num_tokens, self.num_sms)
        return targets


def _send(buffer, kernel, shape, targets, words, num_tokens, num_sms):
    calls = []
    for target, of_rank, n in zip(targets, words, num_tokens):
        target.write(of_rank)
        calls.append((target.r.rank, of_rank, n, blocks_for(n, shape.lamport)))
    buffer.launch_all(kernel, calls, num_sms)


class _Again:
    """What a dispatch without a wait does once more, where a process has one rank, with arrays in GPU memory."""

    def __init__(self, plan):
        buffer, rows = plan.buffer, plan.n_ranks * plan.buffer.max_tokens
        self.plan, self.buffer, (self.r,), (n,) = plan, buffer, buffer.ranks, plan.num_tokens
        self.result, (self.of_handle,) = plan.received.of(rows), plan.of_handle
        fields = self.result.fields
        self.places = [(i, fields[name].offset) for i, name in plan.received.places]
        self.words, self.rows, self.names = [0] * N_WORDS, rows, plan.received.names
        self.words[CAPACITY] = rows
        self.at = plan.info, plan.info + plan.counts_at, plan.row_of[0], plan.per_expert
        n_blocks = blocks_for(n, plan.shape.lamport)
        self.launch = buffer.find(plan.kernel, self.r.rank, n, None, plan.num_sms, n_blocks)

    def start(self, x, ids, probs, group):
        """As DispatchPlan.start of one rank's arrays; None if the heap has no room."""
        r, plan, buffer = self.r, self.plan, self.buffer
        loan = r.heap.lend(self.result)
        if loan is None:
            return None
        handle = r.arena.lend(self.of_handle)
        if buffer.is_captured:
            r.heap.captured.append(loan)
            r.arena.captured.append(handle)
        words, start, base = self.words[:], loan.start, handle.base
        info, counts, row_of, per_expert = self.at
        words[X], words[IDS], words[PROBS] = x.address, ids.address, probs.address
        words[INFO], words[COUNTS] = base + info, base + counts
        words[ROW_OF], words[PER_EXPERT] = base + row_of, base + per_expert
        for i, offset in self.places:
            words[i] = start + offset
        self.launch.start(*words)
        buffer.kept = x, ids, probs
        made = RowsHandle(
            plan.ranks,
            plan.num_experts,
            plan.top_k,
            plan.num_tokens,
            None,
            [handle],
            self.rows,
            group,
        )
        return [(*loan.arrays(self.names), *handle.arrays(PER_EXPERTS))], made


def dispatch(buffer, x, token_indices, token_probs, num_experts, num_sms, on_device, group=None):
    """Send every token to the ranks of its experts, once to each. Arguments and results: FusedDispatch.forward.

    Of each rank of this process, as lists: (recv_x or (recv_x, recv_scales), recv_token_indices, recv_token_probs,
    tokens_per_expert), and the handle of all.
    """
    if on_device and buffer.is_alone:
        one, ids, probs = seen(x), seen(token_indices), seen(token_probs)
        if one is not None and ids is not None and probs is not None:
            key = "dispatch", one.form, ids.form, probs.form, num_experts, num_sms, True
            plan = buffer.known(key)
            if plan is not None and not (one.address | ids.address | probs.address) % VECTOR:
                made = plan.again and plan.again.start(one, ids, probs, group)
                if made is not None:
                    return made
    xs, x_form = arguments.look(buffer, "x", x)
    ids, ids_form = arguments.look(buffer, "token_indices", token_indices)
    probs, probs_form = arguments.look(buffer, "token_probs", token_probs)
    plan = buffer.plan(
        ("dispatch", x_form, ids_form, probs_form, num_experts, num_sms, on_device),
        lambda: DispatchPlan(
            buffer, x, token_indices, token_probs, num_experts, num_sms, on_device
        ),
    )
    return plan.start(xs, ids, probs, group)


class Told:
    """What a dispatch told the host of one rank: whether there was room, tokens by rank, counts [R, R], by expert."""

    def __init__(self, n_ranks, words, tokens_per_expert):
        self.has_room = bool(words[records.HAS_ROOM])
        self.padded_rows = int(words[records.PADDED_ROWS])
        self.tokens = words[records.TOKENS : records.TOKENS + n_ranks]
        self.counts = words[records.TOKENS + n_ranks :].reshape(n_ranks, n_ranks).astype(np.int64)
        self.tokens_per_expert = tokens_per_expert


def told_by(buffer, loans):
    """Wait for a dispatch, and read what it told of each rank of this process; raises what the kernels recorded.

    The most tokens of a rank are remembered, also where there was room for all rows: the next call may not look.
    """
    told = [
        Told(buffer.world.n_ranks, *words)
        for words in buffer.told(loans, "info", "tokens_per_expert")
    ]
    buffer.want_tokens(max(told[0].tokens.tolist()))
    return told


def write_handle(words, buffer, loan):
    """Enter a handle's memory of a rank into the words of a launch."""
    words[ROW_OF] = loan.address("row_of")
    words[COUNTS] = loan.address("info") + counts_offset(buffer.n_ranks)


class _CachedPlan:
    """Cached dispatches of rows of this form, for handles of so many tokens."""

    def __init__(self, buffer, name, x, num_tokens, num_sms):
        self.buffer, self.name, self.num_tokens, self.num_sms = buffer, name, num_tokens, num_sms
        xs = arguments.hidden_rows(buffer, name, x, n_rows=num_tokens)
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        buffer.expect_open()
        self.received, self.room = _Received(hidden, dtype), -1
        self.shape = buffer.launches.shape(
            1,
            hidden * dtype.itemsize,
            to_send=num_tokens,
            top_k=1,
            by_all=buffer.launches.are_all(num_sms),
        )
        self.kernel = resend_kernel(self.shape)
        self.facts = dict(call="the gradient of combine", hidden=hidden, dtype=str(dtype))

    def start(self, xs, handle):
        """Launch: recv_x of each rank."""
        buffer, most_rows, place = self.buffer, handle.most_rows, self.buffer.placing.place
        if most_rows > self.room:
            # Counts are known to all ranks, so all grow together; in the staging area there is then room on every rank.
            buffer.want_pool(
                self.facts,
                staging_bytes=0,
                result_bytes=self.received.of(most_rows).nbytes,
                **buffer.launches.window_bytes(self.shape),
            )
            self.room = most_rows
        with buffer.letting_go() if device.SIM else nullcontext():
            targets = [_Target(buffer, r, self.received, most_rows) for r in buffer.ranks]
            words = []
            for r, a, loan in zip(buffer.ranks, xs, handle.loans):
                of_rank = [0] * N_WORDS
                of_rank[X] = place(r.rank, self.name, a)
                write_handle(of_rank, buffer, loan)
                words.append(of_rank)
            _send(buffer, self.kernel, self.shape, targets, words, self.num_tokens, self.num_sms)
            return [x for (x,) in _settled(buffer, targets, handle.num_rows)]


def cached_dispatch(buffer, name, x, handle, num_sms=None):
    """The rows of x [T, H] where an earlier dispatch sent its tokens: a list of [N, H], of x's dtype."""
    xs, forms = arguments.look(buffer, name, x)
    plan = buffer.plan(
        ("cached dispatch", forms, tuple(handle.num_tokens), num_sms),
        lambda: _CachedPlan(buffer, name, x, handle.num_tokens, num_sms),
    )
    return plan.start(xs, handle)


class _CombinePlan(ReturnPlan):
    """Combines of rows of this form, for handles of so many tokens."""

    write_handle = staticmethod(write_handle)

    def __init__(self, buffer, name, x, handle, probs, num_sms):
        has_probs = not arguments.absent(probs)
        xs = arguments.hidden_rows(
            buffer, name, x, dtypes=tuple(arguments.NAMES), n_rows=handle.num_rows
        )
        (_, hidden), dtype = xs[0].shape, xs[0].dtype
        if has_probs:
            arguments.matrices(
                buffer,
                f"probs of {name}",
                probs,
                dtypes=(FP32,),
                n_rows=handle.num_rows,
                n_columns=handle.top_k,
            )
        buffer.expect_open()
        shape = buffer.launches.shape(
            1,
            hidden * dtype.itemsize,
            to_combine=handle.num_tokens,
            top_k=handle.top_k,
            by_all=buffer.launches.are_all(num_sms),
            has_probs=has_probs,
            dtype=arguments.NAMES[dtype],
        )
        super().__init__(
            buffer, shape, name, hidden, dtype, handle.num_tokens, handle.top_k, num_sms
        )


def combine(buffer, name, x, handle, probs=None, num_sms=None):
    """Sums over ranks of rows x [N, H], and slot by slot of probs [N, K]: two lists, the second None without probs."""
    if probs is None and buffer.is_alone and handle.counts is None:
        made = ReturnPlan.known(
            buffer, ("combine", handle.capacity, handle.top_k), x, handle, num_sms
        )
        if made is not None:
            return made
    (xs, of_probs), key = ReturnPlan.seen(buffer, name, x, probs, handle)
    plan = buffer.plan(
        ("combine", key, handle.top_k, num_sms),
        lambda: _CombinePlan(buffer, name, x, handle, probs, num_sms),
    )
    made = plan.start(xs, of_probs, handle, handle.most_returned)
    if probs is None and buffer.is_alone and handle.counts is None:
        key = "combine", handle.capacity, handle.top_k
        plan.remember(key, xs[0], handle, handle.most_returned)
    return made
