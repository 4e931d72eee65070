"""HybridEPDispatch and HybridEPCombine on a Buffer: a row for each (token, local expert), grouped by expert.

A token travels once to a rank and is expanded there, in the staging area's order; on the way back each rank sums its
experts' rows first. Results are a rank's own memory, so no call needs room that another may lack.
"""

import numpy as np

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.arguments import BF16, E4M3, FP8_GROUP, FP16, FP32
from epmoe.fused_a2a.expanding import (
    First,
    Results,
    StagingArea,
    expanded,
    handle_values,
    staged_bytes,
)
from epmoe.fused_a2a.handles import HybridHandle, handle_of
from epmoe.fused_a2a.heap import arrays_in
from epmoe.fused_a2a.returning import sums_of_rows
from epmoe.fused_a2a.rows import told_by
from epmoe.kernels.rows import resend_kernel
from epmoe.kernels.rows.senders import fp8_format
from epmoe_ref.errors import EPValueError

TYPES = (BF16, FP16)


def dispatch_forward(
    buffer,
    x,
    routing_map,
    probs,
    num_local_experts,
    pad_multiple=None,
    fp8_dispatch=False,
    p2p_world_size=None,
    num_sms=(None, None),
    group=None,
):
    """Send every token to each of its experts, rows grouped by expert. Arguments and results: HybridEPDispatch.forward.

    The host waits: num_permuted_tokens is None.
    num_sms: granted to dispatch, to combine. Of each rank of this process, as lists: dispatched_hidden,
    dispatched_probs, dispatched_scaling_factor, tokens_per_expert; and the handle of all.
    """
    numbers = num_local_experts, None, pad_multiple, fp8_dispatch, p2p_world_size, num_sms
    made, key = buffer.steady.again("exact hybrid dispatch", x, routing_map, probs, numbers)
    if made is None:
        return new_dispatch(buffer, key, x, routing_map, probs, *numbers, group)
    finished, kept = made
    told = told_by(buffer, kept[0])
    if told[0].has_room:
        return finished(kept[0], told)
    buffer.steady.give_back()  # the others need more room than any had; all come to this
    return new_dispatch(buffer, key, x, routing_map, probs, *numbers, group, kept, told)


def new_dispatch(
    buffer,
    key,
    x,
    routing_map,
    probs,
    num_local_experts,
    num_permuted_tokens,
    pad_multiple,
    fp8_dispatch,
    p2p_world_size,
    num_sms,
    group,
    kept=None,
    told=None,
):
    """dispatch_forward the general way, also if num_permuted_tokens are given. key: of SteadyCalls.

    told, kept: what it has told, and its memory (see First), if it was launched already, and there was no room.
    """
    is_exact, world = num_permuted_tokens is None, buffer.world
    arguments.ranks_that_fit(world.n_ranks)
    local = arguments.local_experts(num_local_experts, world.n_ranks)
    pad = arguments.padding(pad_multiple, local)
    limit = None if is_exact else arguments.rows("num_permuted_tokens", num_permuted_tokens)
    a_world = (
        world.n_ranks
        if p2p_world_size is None
        else arguments.whole("p2p_world_size", p2p_world_size, 1)
    )
    if world.n_ranks % a_world:
        raise EPValueError(f"p2p_world_size={a_world} must divide n_ranks={world.n_ranks}")
    xs = arguments.hidden_rows(buffer, "x", x, dtypes=TYPES)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    if fp8_dispatch and (dtype != BF16 or hidden % FP8_GROUP):
        raise EPValueError(
            f"fp8_dispatch=True needs bfloat16 rows of a multiple of {FP8_GROUP} elements; x is {dtype} "
            f"with {hidden} columns"
        )
    num_tokens = [a.shape[0] for a in xs]
    n_experts, because = (
        local * world.n_ranks,
        f": n_ranks={world.n_ranks} times num_local_experts={local}",
    )
    maps = arguments.matrices(
        buffer,
        "routing_map",
        routing_map,
        dtypes=(np.dtype(bool),),
        n_rows=num_tokens,
        n_columns=n_experts,
        because=because,
    )
    has_probs = not arguments.absent(probs)
    if has_probs:
        probs = arguments.matrices(
            buffer,
            "probs",
            probs,
            dtypes=(FP32,),
            n_rows=num_tokens,
            n_columns=n_experts,
            because=because,
        )
    buffer.expect_open()
    facts = dict(
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
    shape = buffer.launches.shape(
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
    results = Results(buffer, shape, hidden, E4M3 if fp8_dispatch else dtype, num_tokens)

    def handle_with(loans, num_rows):
        overflow = [arrays_in(loan, ("overflow",))[0] for loan in loans]
        # a rank with more tokens than any before gets more rows back than there was room for where they were received
        return HybridHandle(
            local,
            num_tokens,
            num_rows,
            world.n_ranks * buffer.max_tokens,
            pad,
            a_world,
            overflow if world.lists else overflow[0],
            loans,
            group,
            num_sms,
        )

    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        call = First(
            buffer,
            facts,
            shape,
            xs,
            maps,
            probs if has_probs else None,
            num_tokens,
            limit,
            pad,
            kept,
        )
        if limit is not None and (buffer.knows_all_ranks or buffer.max_tokens):

            def results_in(scratch, rows, loan, out):
                loan.expert_row = rows
                return (
                    *results.arrays(out),
                    *arrays_in(loan, ("tokens_per_expert",)),
                    handle_with([loan], [limit]),
                )

            outputs = call.send_and_expand(results, num_sms[0])
            memory, lent = call.lent()
            remember([*memory, results.memory(limit)], [*lent, outputs[-1]], results_in)
            made = [
                (*results.arrays(out), loan.array("tokens_per_expert"))
                for out, loan in zip(outputs, call.loans)
            ]
            return made, handle_with(call.loans, [limit] * len(made))

        told = call.send(told, num_sms[0])
        loans, capacity = call.loans, call.capacity

        def finished(loans, told):
            """What is returned, when it is told how many rows there are."""
            num_rows = [one.padded_rows if is_exact else limit for one in told]
            made = expanded(buffer, results, loans, num_rows, capacity, num_sms[0])
            per_expert = [
                one.tokens_per_expert if is_exact else loan.array("tokens_per_expert")
                for one, loan in zip(told, loans)
            ]
            return [(*row, n) for row, n in zip(made, per_expert)], handle_with(loans, num_rows)

        def exact_in(scratch, rows, loan):
            loan.expert_row = rows
            return finished, ([loan], [scratch])

        if is_exact:
            remember(*call.lent(), exact_in)
    return finished(loans, told)


def same_pad(pad_multiple, handle):
    """Nothing, if pad_multiple is what the handle has."""
    if (arguments.whole("pad_multiple", pad_multiple, 0) or 1) != handle.pad_multiple:
        raise EPValueError(
            f"pad_multiple={pad_multiple}, the handle has {handle.pad_multiple}: leave it out, or give "
            "what the dispatch was given"
        )


def cached_dispatch(buffer, name, x, handle, num_sms=None):
    """The tokens x [T, H] as rows of experts, as an earlier dispatch placed them: a list of [P, H], of x's dtype."""
    handle_of(HybridHandle, handle)
    made, key = buffer.steady.again("hybrid cached", x, None, None, (num_sms,), handle.seen)
    return new_cached_dispatch(buffer, key, name, x, handle, num_sms) if made is None else made


def new_cached_dispatch(buffer, key, name, x, handle, num_sms):
    """cached_dispatch the general way. key: of SteadyCalls."""
    xs = arguments.hidden_rows(buffer, name, x, dtypes=TYPES, n_rows=handle.num_tokens)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    buffer.expect_open()
    row_bytes = hidden * dtype.itemsize
    facts = dict(call="the gradient of hybrid_ep_combine", hidden=hidden, dtype=str(dtype))
    buffer.want_pool(
        facts, staging_bytes=staged_bytes(handle.capacity, row_bytes, 0), flag_rows=handle.capacity
    )
    staged = StagingArea(buffer, handle.capacity, row_bytes, 0)
    shape = buffer.launches.shape(handle.num_local_experts, row_bytes, expands=True)
    outputs, calls = [], []
    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        for i, (r, loan, rows) in enumerate(zip(buffer.ranks, handle.loans, handle.num_rows)):
            shapes = {"x": ((rows, hidden), dtype)}
            outputs.append(r.arena.lend("hybrid result", shapes))
            values = (
                buffer.values(r)
                | staged.values
                | handle_values(buffer, loan)
                | staged.sources(buffer, r)
                | dict(
                    x=buffer.placing.place(r.rank, name, xs[i]),
                    n_rows=rows,
                    pad=handle.pad_multiple,
                    out=outputs[i].address("x"),
                )
            )
            calls.append((r.rank, values, handle.num_tokens[i], handle.num_tokens[i] + rows))
        buffer.launch_all(resend_kernel(shape), calls, num_sms)

        def memory_for(n, _):
            return [r.arena.memory("hybrid result", {"x": ((n, hidden), dtype)})]

        n_tokens = handle.num_tokens[-1]

        def numbers(n, _):
            return n, buffer.launches.grid(num_sms, n_tokens + n)

        remember(memory_for, outputs[-1:], lambda loan, _: arrays_in(loan, ("x",)), numbers)
    return [loan.array("x") for loan in outputs]


def combine_forward(buffer, name, x, handle, probs=None, num_sms=None):
    """Sums of rows x [P, H] over experts, ranks and worlds, and probs [P] back in their places [T, E]: two lists."""
    made, key = buffer.steady.again("hybrid combine", x, probs, None, (num_sms,), handle.seen)
    return new_combine(buffer, key, name, x, handle, probs, num_sms) if made is None else made


def new_combine(buffer, key, name, x, handle, probs, num_sms):
    """combine_forward the general way. key: of SteadyCalls."""
    local, has_probs = handle.num_local_experts, not arguments.absent(probs)
    xs = arguments.hidden_rows(buffer, name, x, dtypes=TYPES, n_rows=handle.num_rows)
    (_, hidden), dtype = xs[0].shape, xs[0].dtype
    if has_probs:
        probs = [
            arguments.array(buffer, f"probs of {name}", r, p)
            for r, p in zip(buffer.ranks, arguments.of_ranks(buffer, f"probs of {name}", probs))
        ]
        for r, p, rows in zip(buffer.ranks, probs, handle.num_rows):
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
    return sums_of_rows(
        buffer,
        key,
        shape,
        name,
        xs,
        probs,
        handle,
        handle.capacity,
        buffer.world.n_ranks * local,
        handle_values,
        num_sms,
    )
