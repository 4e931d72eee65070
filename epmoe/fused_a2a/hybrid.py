"""HybridEPDispatch and HybridEPCombine on a Buffer: a row for each (token, local expert), grouped by expert.

A token travels once to a rank and is expanded there, in the staging area's order; on the way back each rank sums its
experts' rows first. Results are a rank's own memory, so no call needs room that another may lack.
"""

from dataclasses import replace

import numpy as np
from epmoe_ref.errors import EPValueError

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.handles import HybridHandle, counts_offset, handle_of, info_words
from epmoe.fused_a2a.heap import arrays_in
from epmoe.fused_a2a.returning import sums_of_rows
from epmoe.fused_a2a.rows import told_by
from epmoe.host.lending import arrange
from epmoe.kernels.rows import dispatch_kernel, expand_kernel, resend_kernel
from epmoe.kernels.rows.companions import expert_masks
from epmoe.kernels.rows.senders import fp8_format

NO_LIMIT = 2**31 - 1
TYPES = (BF16, FP16)


def staged_arrays(rows, row_bytes, local):
    """What lies in the staging area between sending and expanding: {name: (shape, dtype)}."""
    return {"x": ((rows, row_bytes), np.uint8), "slots": ((rows, local), np.int32), "probs": ((rows, local), FP32),
            "masks": ((rows, expert_masks(local)), np.uint32)}


def staged_bytes(rows, row_bytes, local):
    """Bytes of the staging area for so many rows."""
    return arrange(staged_arrays(rows, row_bytes, local))[1]


class _Staged:
    """The staging area of every rank for one call: fields, and the room [rows] that there is."""

    def __init__(self, buffer, rows, row_bytes, local):
        self.fields, self.nbytes = arrange(staged_arrays(rows, row_bytes, local))
        self.has_room = self.nbytes <= buffer.staging_bytes
        at = [self.fields[name].offset for name in ("x", "slots", "probs", "masks")]
        self.values = dict(places=[buffer.staging_at + offset for offset in at],
                           capacity=rows if self.has_room else 0xFFFFFFFF)
        self._offsets = at

    def sources(self, buffer, r):
        """The fields of the parameter block for expanding it on a rank."""
        return dict(sources=[buffer.staging(r) + offset for offset in self._offsets])


def dispatch_forward(buffer, x, routing_map, probs, num_local_experts, *, num_permuted_tokens=None, pad_multiple=None,
                     fp8_dispatch=False, p2p_world_size=None, num_sms=None):
    """Send every token to each of its experts, rows grouped by expert. Arguments and results: HybridEPDispatch.forward.

    Of each rank of this process, as lists: dispatched_hidden, dispatched_probs, dispatched_scaling_factor,
    tokens_per_expert; and the handle of all.
    """
    key = None
    if num_permuted_tokens is not None:
        made, key = buffer.steady.again("hybrid dispatch", (x, routing_map, probs), num_local_experts,
                                        num_permuted_tokens, pad_multiple, fp8_dispatch, p2p_world_size, num_sms)
        if made is not None:
            return made
    world = buffer.world
    arguments.ranks_that_fit(world.n_ranks)
    local = arguments.whole("num_local_experts", num_local_experts, 1)
    pad = arguments.whole("pad_multiple", pad_multiple or 0, 0) or 1
    limit = None if num_permuted_tokens is None else arguments.whole("num_permuted_tokens", num_permuted_tokens, 0)
    a_world = world.n_ranks if p2p_world_size is None else arguments.whole("p2p_world_size", p2p_world_size, 1)
    if world.n_ranks % a_world:
        raise EPValueError(f"p2p_world_size={a_world} must divide n_ranks={world.n_ranks}")
    xs = arguments.hidden_rows(buffer, "x", x, dtypes=TYPES)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    if fp8_dispatch and (dtype != BF16 or hidden % FP8_GROUP):
        raise EPValueError(f"fp8_dispatch=True needs bfloat16 rows of a multiple of {FP8_GROUP} elements; x is {dtype} "
                           f"with {hidden} columns")
    num_tokens = [a.shape[0] for a in xs]
    n_experts, because = local * world.n_ranks, f": n_ranks={world.n_ranks} times num_local_experts={local}"
    maps = arguments.matrices(buffer, "routing_map", routing_map, dtypes=(np.dtype(bool),), n_rows=num_tokens,
                              n_columns=n_experts, because=because)
    has_probs = not arguments.absent(probs)
    if has_probs:
        probs = arguments.matrices(buffer, "probs", probs, dtypes=(FP32,), n_rows=num_tokens, n_columns=n_experts,
                                   because=because)
    buffer.expect_open()
    buffer.want_experts(local)
    row_bytes = fp8_format(hidden).token_size if fp8_dispatch else hidden * dtype.itemsize
    shape = buffer.launches.shape(
        local, row_bytes, to_expand=num_tokens, has_probs=has_probs, has_meta=True,
        value_bytes=hidden if fp8_dispatch else 0,
        scale_words=hidden // FP8_GROUP if fp8_dispatch else 0, encode=bool(fp8_dispatch))
    if buffer.knows_all_ranks or limit is not None and buffer.max_tokens:
        # without a look at the device, a batch larger than any before is taken to be that large on all ranks
        buffer.want_tokens(max(num_tokens))
    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        call = _First(buffer, shape, xs, maps, probs if has_probs else None, num_tokens, limit, pad)
        call.launch(hidden, E4M3 if fp8_dispatch else dtype, num_sms)
        num_rows, capacity = call.num_rows, call.most_rows

        def handle_with(loans):
            overflow = [arrays_in(loan, ("overflow",))[0] for loan in loans]
            return HybridHandle(local, num_tokens, num_rows, capacity, pad, a_world,
                                overflow if world.lists else overflow[0], loans)

        def result(out, per_expert):
            x, row_probs, row_scales = arrays_in(out, ("x", "probs", "scales"))
            return x, row_probs if has_probs else None, row_scales if fp8_dispatch else None, per_expert

        def results_in(scratch, rows, loan, out):
            loan.expert_row = rows
            return [result(out, *arrays_in(loan, ("tokens_per_expert",)))], handle_with([loan])

        if limit is not None:
            remember(*call.lent(), results_in)
        per_expert = [loan.array("tokens_per_expert") for loan in call.loans]
        if limit is None:
            per_expert = [one.tokens_per_expert for one in call.told]
    return [result(out, n) for out, n in zip(call.outputs, per_expert)], handle_with(call.loans)


class _First:
    """One HybridEP dispatch: the memory of its handle, and its launches."""

    def __init__(self, buffer, shape, xs, maps, probs, num_tokens, limit, pad):
        self.buffer, self.shape, self.num_tokens, self.limit, self.pad = buffer, shape, num_tokens, limit, pad
        self.given, self.scratch = [], []
        place = buffer.placing.place
        for i, r in enumerate(buffer.ranks):
            self.given.append(dict(x=place(r.rank, "x", xs[i]), ids=place(r.rank, "routing_map", maps[i]),
                                   probs=place(r.rank, "probs", probs[i]) if probs else 0))
            self.scratch.append(r.arena.lend("rows scratch", self._scratch_of(i)))

    def lent(self):
        """For SteadyCalls: the memory of the last rank's loans, and these."""
        r, i = self.buffer.ranks[-1], len(self.buffer.ranks) - 1
        shapes = (("rows scratch", self._scratch_of(i)), ("hybrid rows", self._rows_of()),
                  ("hybrid handle", self._handle_of(i)), ("hybrid result", self._result_of(i)))
        loans = self.scratch[-1], self.expert_rows[-1], self.loans[-1], self.outputs[-1]
        return [r.arena.memory(*what) for what in shapes], loans

    def _scratch_of(self, i):
        n, shape = self.num_tokens[i], self.shape
        return {"slot_of": ((n, shape.n_experts), np.int32),
                "encoded": ((n, shape.row_bytes if shape.encode else 0), np.uint8)}

    def _rows_of(self):
        return {"expert_row": ((self.capacity, self.shape.n_local_experts), np.int32)}

    def _handle_of(self, i):
        n_ranks, local = self.shape.n_ranks, self.shape.n_local_experts
        return {"info": ((info_words(n_ranks),), np.int32), "tokens_per_expert": ((local,), np.int64),
                "overflow": ((1,), np.int32), "expert_base": ((n_ranks, local), np.int32),
                "expert_rows": ((2, local), np.int32), "row_of": ((self.num_tokens[i], n_ranks), np.int32)}

    def _result_of(self, i):
        rows, n_scales = self.num_rows[i], self.shape.scale_words
        return {"x": ((rows, self.hidden), self.dtype), "probs": ((rows if self.shape.has_probs else 0,), FP32),
                "scales": ((rows if n_scales else 0, n_scales), FP32)}

    def launch(self, hidden, dtype, num_sms):
        """Send and expand; the host waits only where P or the room for the first batch has to be found out."""
        buffer, self.hidden, self.dtype, n_ranks = self.buffer, hidden, dtype, self.shape.n_ranks
        must_look = self.limit is None or not (buffer.knows_all_ranks or buffer.max_tokens)
        self._prepare()
        if not must_look:
            self.num_rows, self.most_rows = [self.limit] * len(buffer.ranks), self.capacity
            self._lend_outputs()
            with buffer.launching() as streams:
                self._expand(dispatch_kernel(replace(self.shape, expands=True)), streams, num_sms)
            return
        with buffer.launching() as streams:
            self._send(dispatch_kernel(self.shape), streams, num_sms)
        self.told = told = told_by(buffer, self.loans)
        kept = self.loans
        if not told[0].has_room:        # every rank has seen it, and comes to the same number of tokens here
            self._prepare(kept)
            with buffer.launching() as streams:
                self._send(resend_kernel(self.shape), streams, num_sms)
        # a rank with more tokens than any before gets more rows back than there was room for where they were received
        self.most_rows = n_ranks * buffer.max_tokens
        self.num_rows = [t.padded_rows if self.limit is None else self.limit for t in told]
        self._lend_outputs()
        with buffer.launching() as streams:
            self._expand(expand_kernel(self.shape), streams, num_sms)

    def _prepare(self, kept=None):
        """The staging area, and the memory of the handle; `kept` loans hold what a first try has found out."""
        buffer, n_ranks, local = self.buffer, self.buffer.world.n_ranks, self.shape.n_local_experts
        self.capacity, row_bytes = n_ranks * buffer.max_tokens, self.shape.row_bytes
        if buffer.knows_all_ranks or buffer.max_tokens:     # else: the first call asks the ranks for their tokens
            buffer.want_pool(staged_bytes(self.capacity, row_bytes, local), flag_rows=self.capacity)
        self.staged = _Staged(buffer, self.capacity, row_bytes, local)
        self.expert_rows = [r.arena.lend("hybrid rows", self._rows_of()) for r in buffer.ranks]
        if kept is None:
            self.loans = [r.arena.lend("hybrid handle", self._handle_of(i)) for i, r in enumerate(buffer.ranks)]
        for loan, rows in zip(self.loans, self.expert_rows):
            loan.expert_row = rows

    def _values(self, i):
        r, limit = self.buffer.ranks[i], NO_LIMIT if self.limit is None else self.limit
        at = self.loans[i].address
        return (self.buffer.values(r) | self.given[i] | self.staged.values | handle_values(self.buffer, self.loans[i])
                | dict(info=at("info"), tokens_per_expert=at("tokens_per_expert"), overflow=at("overflow"),
                       expert_base=at("expert_base"), slot_of=self.scratch[i].address("slot_of"),
                       encoded=self.scratch[i].address("encoded"), n_rows=limit, pad=self.pad))

    def _send(self, kernel, streams, num_sms):
        for i, r in enumerate(self.buffer.ranks):
            self.buffer.launches.start(kernel, r.rank, self._values(i), self.num_tokens[i], streams[r.rank], num_sms)

    def _lend_outputs(self):
        self.outputs = [r.arena.lend("hybrid result", self._result_of(i)) for i, r in enumerate(self.buffer.ranks)]

    def _expand(self, kernel, streams, num_sms):
        for i, r in enumerate(self.buffer.ranks):
            out, rows = self.outputs[i].address, self.num_rows[i]
            values = self._values(i) | self.staged.sources(self.buffer, r) | dict(
                n_rows=rows, out=out("x"), out_probs=out("probs"), out_scales=out("scales"))
            self.buffer.launches.start(kernel, r.rank, values, self.num_tokens[i], streams[r.rank], num_sms,
                                       self.num_tokens[i] + rows)


def handle_values(buffer, loan):
    """The fields of the parameter block that a handle fills in."""
    at = loan.address
    return dict(row_of=at("row_of"), counts=at("info") + counts_offset(buffer.world.n_ranks),
                expert_rows=at("expert_rows"), expert_row=loan.expert_row.address("expert_row"))


def same_pad(pad_multiple, handle):
    """Nothing, if pad_multiple is what the handle has."""
    if (arguments.whole("pad_multiple", pad_multiple, 0) or 1) != handle.pad_multiple:
        raise EPValueError(f"pad_multiple={pad_multiple}, the handle has {handle.pad_multiple}: leave it out, or give "
                           "what the dispatch was given")


def cached_dispatch(buffer, name, x, handle, num_sms=None):
    """The tokens x [T, H] as rows of experts, as an earlier dispatch placed them: a list of [P, H], of x's dtype."""
    handle_of(HybridHandle, handle)
    made, key = buffer.steady.again("hybrid cached", (x,), num_sms, handle=handle.seen)
    if made is not None:
        return made
    xs = arguments.hidden_rows(buffer, name, x, dtypes=TYPES, n_rows=handle.num_tokens)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    buffer.expect_open()
    row_bytes, n_ranks = hidden * dtype.itemsize, buffer.world.n_ranks
    buffer.want_pool(staged_bytes(handle.capacity, row_bytes, 0), flag_rows=handle.capacity)
    staged = _Staged(buffer, handle.capacity, row_bytes, 0)
    shape = buffer.launches.shape(handle.num_local_experts, row_bytes, expands=True)
    outputs, calls = [], []
    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        for i, (r, loan, rows) in enumerate(zip(buffer.ranks, handle.loans, handle.num_rows)):
            shapes = {"x": ((rows, hidden), dtype)}
            outputs.append(r.arena.lend("hybrid result", shapes))
            values = buffer.values(r) | staged.values | handle_values(buffer, loan) | staged.sources(buffer, r) | dict(
                x=buffer.placing.place(r.rank, name, xs[i]), n_rows=rows, pad=handle.pad_multiple,
                out=outputs[i].address("x"))
            calls.append((r.rank, values, handle.num_tokens[i], handle.num_tokens[i] + rows))
        buffer.launch_all(resend_kernel(shape), calls, num_sms)
        remember([r.arena.memory("hybrid result", shapes)], outputs, lambda loan: arrays_in(loan, ("x",)))
    return [loan.array("x") for loan in outputs]


def combine_forward(buffer, name, x, handle, probs=None, num_sms=None):
    """Sums of rows x [P, H] over experts, ranks and worlds, and probs [P] back in their places [T, E]: two lists."""
    handle_of(HybridHandle, handle)
    made, key = buffer.steady.again("hybrid combine", (x, probs), num_sms, handle=handle.seen)
    if made is not None:
        return made
    local, has_probs = handle.num_local_experts, not arguments.absent(probs)
    xs = arguments.hidden_rows(buffer, name, x, dtypes=TYPES, n_rows=handle.num_rows)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    if has_probs:
        probs = [arguments.array(buffer, f"probs of {name}", r, p)
                 for r, p in zip(buffer.ranks, arguments.of_ranks(buffer, f"probs of {name}", probs))]
        for r, p, rows in zip(buffer.ranks, probs, handle.num_rows):
            if p.dtype != FP32 or p.shape != (rows,):
                raise EPValueError(f"probs of {name} of rank {r.rank} is {p.dtype} {p.shape}, float32 ({rows},) is "
                                   "needed")
    buffer.expect_open()
    shape = buffer.launches.shape(local, hidden * dtype.itemsize, to_combine=handle.num_tokens, has_probs=has_probs,
                                  dtype=arguments.NAMES[dtype], p2p_world_size=handle.p2p_world_size)
    return sums_of_rows(buffer, key, shape, name, xs, probs, handle, handle.capacity, buffer.world.n_ranks * local,
                        handle_values, num_sms)
