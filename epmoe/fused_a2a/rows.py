"""FusedDispatch and FusedCombine on a Buffer: a token travels once to a rank, however many of its experts are there."""

from dataclasses import replace

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.handles import RowsHandle, counts_offset, handle_of, info_words
from epmoe.fused_a2a.heap import Staged, arrays_in, is_in_heap
from epmoe.fused_a2a.returning import sums_of_rows
from epmoe.host.lending import arrange
from epmoe.kernels.rows import dispatch_kernel, move_kernel, records, resend_kernel
from epmoe.kernels.rows.roles import blocks_for

MOVED = "rows result"  # memory of results that found no room in the heap
PLACES = ("x", "ids", "probs", "scales")  # order of the arrays of a result in a note


def result_arrays(rows, hidden, dtype, top_k=0, scales=0):
    """Arrays of a received result with room for `rows` rows: {name: (shape, dtype)}."""
    arrays = {"x": ((rows, hidden), dtype)}
    if top_k:
        arrays |= {"ids": ((rows, top_k), np.int64), "probs": ((rows, top_k), FP32)}
    if scales:
        arrays["scales"] = ((rows, scales), FP32)
    return arrays


def _native(dtype):
    """The type in this machine's byte order, which kernels read."""
    return dtype.newbyteorder("=")


class _Target:
    """Where one rank's result of a call is received: a loan of the pool's heap, or the staging area."""

    def __init__(self, buffer, r, arrays_of, rows):
        self.buffer, self.r, self.arrays_of = buffer, r, arrays_of
        self.capacity, self.loan = rows, r.heap.lend(arrays_of(rows))
        if self.loan is None:
            self.fields, nbytes = arrange(arrays_of(rows))
            if nbytes > buffer.pool_layout.staging_bytes:
                self.capacity = -1  # no room at all: not even for zero rows, so that all ranks grow

    def _address(self, name):
        if self.loan is not None:
            return self.loan.address(name)
        return self.buffer.staging(self.r) + self.fields[name].offset

    def values(self):
        """The fields of the parameter block that say it."""
        if self.capacity < 0:
            return dict(places=[0] * len(PLACES), capacity=0xFFFFFFFF)
        names = self.arrays_of(0)
        return dict(
            places=[
                self.buffer.offset(self.r, self._address(n)) if n in names else 0 for n in PLACES
            ],
            capacity=self.capacity,
        )

    def settle(self, rows, stream):
        """Launch the move out of the staging area, if the result is there; there is a loan afterwards."""
        if self.loan is None:
            self.loan = _move(self.buffer, self.r, self.fields, self.arrays_of(rows), rows, stream)


def _move(buffer, r, fields, shapes, rows, stream):
    """Launch the move of so many rows out of the staging area, where arrays lie as fields say: the Loan of them."""
    loan, names = r.arena.lend(MOVED, shapes), [name for name in PLACES if name in shapes]
    fill = [0] * (len(PLACES) - len(names))
    values = buffer.values(r) | dict(
        sources=[buffer.staging(r) + fields[name].offset for name in names] + fill,
        targets=[loan.address(name) for name in names] + fill,
        word_counts=[loan.fields[name].nbytes // 4 for name in names] + fill,
    )
    kernel = move_kernel(buffer.world.n_ranks, buffer.launches.threads)
    buffer.launches.start(kernel, r.rank, values, 0, stream, None, rows)
    return loan


def dispatch_forward(buffer, x, token_indices, token_probs, num_experts, num_sms=None):
    """Send every token to the ranks of its experts, once to each. Arguments and results: FusedDispatch.forward.

    Of each rank of this process, as lists: (recv_x or (recv_x, recv_scales), recv_token_indices, recv_token_probs,
    tokens_per_expert), and the handle of all.
    """
    made, key = buffer.steady.again(
        "exact dispatch", x, token_indices, token_probs, (num_experts, num_sms)
    )
    if made is None:
        return new_dispatch(buffer, key, x, token_indices, token_probs, num_experts, num_sms, False)
    told, loans = told_by(buffer, made[1].loans), made[1].loans
    if told[0].has_room:
        return _exact(made, told[0])
    del made
    buffer.steady.give_back()  # the others need more room than any had; all come to this
    return new_dispatch(
        buffer, key, x, token_indices, token_probs, num_experts, num_sms, False, told, loans
    )


def new_dispatch(
    buffer,
    key,
    x,
    token_indices,
    token_probs,
    num_experts,
    num_sms,
    on_device,
    told=None,
    loans=(),
    group=None,
):
    """dispatch_forward the general way. key: of SteadyCalls. group: of handles that known calls give.

    on_device: as fused_dispatch_on_device says.
    told, loans: what it has told, and the handle's memory, if it was launched already, and there was no room.
    """
    loans = list(loans)
    world = buffer.world
    arguments.ranks_that_fit(world.n_ranks)
    local = arguments.experts_per_rank(num_experts, world.n_ranks)
    xs, scales = arguments.values_and_scales(buffer, "x", x)
    num_tokens = [a.shape[0] for a in xs]
    ids = arguments.expert_indices(buffer, token_indices, num_tokens, local * world.n_ranks)
    top_k, (_, hidden), dtype = ids[0].shape[1], xs[0].shape, xs[0].dtype
    probs = arguments.matrices(
        buffer, "token_probs", token_probs, dtypes=(FP32,), n_rows=num_tokens, n_columns=top_k
    )
    n_scales = scales[0].shape[1] if scales else 0
    buffer.expect_open()
    facts = dict(
        call="fused_dispatch",
        hidden=hidden,
        dtype=str(dtype),
        num_experts=local * world.n_ranks,
        top_k=top_k,
        has_scales=bool(n_scales),
        on_device=on_device,
    )
    buffer.want_experts(local, facts)

    def arrays_of(rows):
        return result_arrays(rows, hidden, dtype, top_k, n_scales)

    asks_for_results = buffer.knows_all_ranks or on_device
    if asks_for_results:
        # without a look at the device, a batch larger than any before is taken to be that large on all ranks
        buffer.want_tokens(max(num_tokens))
    wide = all(a.dtype.itemsize == 8 for a in ids)
    by_all = buffer.launches.are_all(num_sms)
    shape = buffer.launches.shape(
        local,
        hidden * dtype.itemsize,
        to_send=num_tokens,
        by_all=by_all,
        top_k=top_k,
        id_bytes=8 if wide else 4,
        scale_words=n_scales,
        has_probs=True,
        has_meta=True,
    )

    def needs(tokens):
        rows = world.n_ranks * tokens
        return dict(
            staging_bytes=0,
            result_bytes=arrange(arrays_of(rows))[1] if asks_for_results else 0,
            **buffer.launches.window_bytes(shape),
        )

    buffer.want_pool_for_tokens(facts, needs)
    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        values = []
        for i, r in enumerate(buffer.ranks):
            place = buffer.placing.place
            of_handle = {
                "info": ((info_words(world.n_ranks),), np.int32),
                "tokens_per_expert": ((local,), np.int64),
                "row_of": ((num_tokens[i], world.n_ranks), np.int32),
            }
            if told is None:
                loans.append(r.arena.lend("rows handle", of_handle))
            at = loans[i].address
            values.append(
                dict(
                    x=place(r.rank, "x", xs[i]),
                    ids=place(
                        r.rank, "token_indices", ids[i], _native(ids[i].dtype) if wide else np.int32
                    ),
                    probs=place(r.rank, "token_probs", probs[i]),
                    scales=place(r.rank, "scales", scales[i]) if scales else 0,
                    info=at("info"),
                    counts=at("info") + counts_offset(world.n_ranks),
                    row_of=at("row_of"),
                    tokens_per_expert=at("tokens_per_expert"),
                )
            )
        told, targets = _send_first(
            buffer, facts, shape, values, loans, num_tokens, arrays_of, num_sms, on_device, told
        )
        ranks, capacity, names = (
            list(world.ranks),
            world.n_ranks * buffer.max_tokens,
            tuple(arrays_of(0)),
        )

        def handle_with(loans, counts=None):
            return RowsHandle(
                ranks, local * world.n_ranks, top_k, num_tokens, counts, loans, capacity, group
            )

        def results_in(of_handle, result):
            x, ids, probs, *scales = arrays_in(result, names)
            (per_expert,) = arrays_in(of_handle, ("tokens_per_expert",))
            return (x, *scales) if scales else x, ids, probs, per_expert, handle_with([of_handle])

        def exact_in(of_handle, result):
            """A function of the number of rows, as soon as that is told, and the handle."""

            def cut(n):
                if is_in_heap(result):
                    return _result(result, n, n_scales)
                return _moved(buffer, arrays_of, n, n_scales, capacity, hidden, dtype, top_k)

            return cut, handle_with([of_handle])

        handle = handle_with(loans, told and told[0].counts)
        lasting = on_device or told[0].has_room and targets[-1].capacity == capacity
        # what has come into the staging area is moved, without a wait, or as a call of its own
        if on_device:
            results = _settle(buffer, targets, handle, n_scales)
        if lasting:
            room = r.arena.memory(MOVED, arrays_of(capacity)) if on_device else Staged
            memory = (
                r.arena.memory("rows handle", of_handle),
                r.heap.memory(arrays_of(capacity), room),
            )
            remember(
                memory,
                [loans[-1], targets[-1].loan or Staged()],
                results_in if on_device else exact_in,
            )
    if on_device:
        per_expert = [loan.array("tokens_per_expert") for loan in loans]
    else:
        results = _settle(buffer, targets, handle, n_scales)
        per_expert = [one.tokens_per_expert for one in told]
    return [(*row, n) for row, n in zip(results, per_expert)], handle


class _Told:
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
        _Told(buffer.world.n_ranks, *words)
        for words in buffer.told(loans, "info", "tokens_per_expert")
    ]
    buffer.want_tokens(max(told[0].tokens.tolist()))
    return told


def _send_first(
    buffer, facts, shape, values, loans, num_tokens, arrays_of, num_sms, on_device, told
):
    """Layout, exchange, sending: (what it told or None, targets). Without room on a rank all grow and resend.

    facts: as for want_pool(). told: what it has told already, if it was launched before, and there was no room.
    """
    world = buffer.world
    if told is None:
        rows = world.n_ranks * max(buffer.max_tokens, *num_tokens)
        targets = [_Target(buffer, r, arrays_of, rows) for r in buffer.ranks]
        _launch(buffer, dispatch_kernel(shape), shape, targets, values, num_tokens, num_sms)
        if on_device:
            return None, targets
        told = told_by(buffer, loans)
        if told[0].has_room:
            return told, targets
    # every rank has seen the same counts, and comes to the same number here
    rows = world.n_ranks * buffer.max_tokens
    buffer.want_pool(facts, staging_bytes=0, result_bytes=arrange(arrays_of(rows))[1])
    targets = [_Target(buffer, r, arrays_of, rows) for r in buffer.ranks]
    _resend(buffer, shape, targets, values, num_tokens, num_sms)
    return told, targets


def _exact(made, told):
    """Results with room for the worst case, and their handle, once it is told how many rows there are."""
    cut, handle = made
    handle = replace(handle, counts=told.counts, loans=list(handle.loans))
    return [(*cut(*handle.num_rows), told.tokens_per_expert)], handle


def _moved(buffer, arrays_of, n, n_scales, capacity, *form):
    """This rank's n rows, which a dispatch that had room for `capacity` received in the staging area: as _result's."""
    made, key = buffer.steady.again(
        "move", None, None, None, (n_scales, capacity, *form), ((), (n,))
    )
    if made is not None:
        return made
    r, (staged, _), (of_one, _) = (
        buffer.ranks[-1],
        arrange(arrays_of(capacity)),
        arrange(arrays_of(1)),
    )
    words = sorted({field.nbytes // 4 for field in of_one.values()})  # of a row
    with buffer.steady.watching(key) as remember:
        with buffer.launching() as streams:
            loan = _move(buffer, r, staged, arrays_of(n), n, streams[r.rank])
        remember(
            lambda n: [r.arena.memory(MOVED, arrays_of(n))],
            [loan],
            lambda loan, n: _result(loan, n, n_scales),
            lambda n: (buffer.launches.grid(None, n), *(n * of_row for of_row in words)),
        )
        return _result(loan, n, n_scales)


def _resend(buffer, shape, targets, values, num_tokens, num_sms):
    _launch(buffer, resend_kernel(shape), shape, targets, values, num_tokens, num_sms)


def _launch(buffer, kernel, shape, targets, values, num_tokens, num_sms):
    calls = [
        (r.rank, buffer.values(r) | given | target.values(), n, blocks_for(n, shape.lamport))
        for r, target, given, n in zip(buffer.ranks, targets, values, num_tokens)
    ]
    buffer.launch_all(kernel, calls, num_sms)


def _settle(buffer, targets, handle, n_scales=0):
    """Results of each rank, cut to the exact rows: tuples (x or (x, scales), ids, probs), or of x alone."""
    made = []
    if any(target.loan is None for target in targets):
        with buffer.launching() as streams:
            for r, target, n in zip(buffer.ranks, targets, handle.num_rows):
                target.settle(n, streams[r.rank])
    for target, n in zip(targets, handle.num_rows):
        made.append(_result(target.loan, n, n_scales))
    return made


def _result(loan, n, n_scales):
    """x or (x, scales), ids, probs, as far as there are any, cut to n rows."""
    x, more = (
        loan.array("x", n),
        [loan.array(name, n) for name in ("ids", "probs") if name in loan.fields],
    )
    return (x, loan.array("scales", n)) if n_scales else x, *more


def _x_of(result, n=None):
    """[x] of a loan, or its first n rows."""
    return arrays_in(result, ("x",)) if n is None else [result.array("x", n)]


def _handle_values(buffer, loan):
    n_ranks = buffer.world.n_ranks
    return dict(row_of=loan.address("row_of"), counts=loan.address("info") + counts_offset(n_ranks))


def cached_dispatch(buffer, name, x, handle, num_sms=None):
    """The rows of x [T, H] where an earlier dispatch sent its tokens: a list of [N, H], of x's dtype."""
    handle_of(RowsHandle, handle)
    made, key = buffer.steady.again("cached", x, None, None, (num_sms,), handle.seen)
    return new_cached_dispatch(buffer, key, name, x, handle, num_sms) if made is None else made


def new_cached_dispatch(buffer, key, name, x, handle, num_sms):
    """cached_dispatch the general way. key: of SteadyCalls."""
    xs = arguments.hidden_rows(buffer, name, x, n_rows=handle.num_tokens)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    buffer.expect_open()

    def arrays_of(rows):
        return result_arrays(rows, hidden, dtype)

    # Counts are known to all ranks, so all grow together; in the staging area there is then room on every rank.
    shape = buffer.launches.shape(
        1,
        hidden * dtype.itemsize,
        to_send=handle.num_tokens,
        top_k=1,
        by_all=buffer.launches.are_all(num_sms),
    )
    facts = dict(call="the gradient of combine", hidden=hidden, dtype=str(dtype))
    buffer.want_pool(
        facts,
        staging_bytes=0,
        result_bytes=arrange(arrays_of(handle.most_rows))[1],
        **buffer.launches.window_bytes(shape),
    )
    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        targets = [_Target(buffer, r, arrays_of, handle.most_rows) for r in buffer.ranks]
        values = [
            dict(x=buffer.placing.place(r.rank, name, a)) | _handle_values(buffer, loan)
            for r, a, loan in zip(buffer.ranks, xs, handle.loans)
        ]
        _resend(buffer, shape, targets, values, handle.num_tokens, num_sms)
        made, r = _settle(buffer, targets, handle), buffer.ranks[-1]

        def memory_for(n, most_rows, _=None):
            return [r.heap.memory(arrays_of(most_rows), r.arena.memory(MOVED, arrays_of(n)))]

        def numbers(n, most_rows, _):
            """What of the launches follows from numbers of rows, if the pool is large enough."""
            if not buffer.pool_layout.holds(0, arrange(arrays_of(most_rows))[1]):
                return None
            return most_rows, buffer.launches.grid(None, n), n * hidden * dtype.itemsize // 4

        memory = memory_for if handle.counts is not None else memory_for(*2 * [handle.capacity])
        remember(memory, [targets[-1].loan], _x_of, numbers)
        return [x for (x,) in made]


def combine_forward(buffer, name, x, handle, probs=None, num_sms=None):
    """Sums over ranks of rows x [N, H], and slot by slot of probs [N, K]: two lists, the second None without probs."""
    made, key = buffer.steady.again("combine", x, probs, None, (num_sms,), handle.seen)
    return new_combine(buffer, key, name, x, handle, probs, num_sms) if made is None else made


def new_combine(buffer, key, name, x, handle, probs, num_sms):
    """combine_forward the general way. key: of SteadyCalls."""
    has_probs = not arguments.absent(probs)
    xs = arguments.hidden_rows(
        buffer, name, x, dtypes=tuple(arguments.NAMES), n_rows=handle.num_rows
    )
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    if has_probs:
        probs = arguments.matrices(
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
    return sums_of_rows(
        buffer,
        key,
        shape,
        name,
        xs,
        probs,
        handle,
        handle.most_returned,
        handle.top_k,
        _handle_values,
        num_sms,
    )
