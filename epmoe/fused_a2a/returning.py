"""What FusedCombine and HybridEPCombine have in common: the launch that sends rows back and sums them by token."""

from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.heap import arrays_in
from epmoe.fused_a2a.pool import align
from epmoe.kernels.rows import combine_kernel, windows


def sums_of_rows(
    buffer, key, shape, name, xs, probs, handle, capacity, n_numbers, values_of, num_sms
):
    """Sums of rows xs over what the handle says, and of their probs: two lists over ranks, the second None without.

    key: of SteadyCalls. shape: RowsShape. name: of xs, for messages. probs: arrays, None without. capacity: rows that a
    rank may get back. n_numbers: of a token in the second result. values_of(buffer, loan): fields of the parameter
    block that the handle's memory of a rank fills in.
    """
    has_probs, (_, hidden), dtype = shape.has_probs, xs[0].shape, xs[0].dtype
    probs_at = align(capacity * shape.row_bytes)
    facts = dict(
        call="combine",
        hidden=hidden,
        dtype=str(dtype),
        has_probs=bool(has_probs),
        probs_a_token=n_numbers,
    )
    buffer.want_pool(
        facts,
        staging_bytes=probs_at + 4 * shape.n_meta * capacity * has_probs,
        flag_rows=capacity,
        window_bytes=windows.bytes_for(shape),
        **buffer.launches.window_bytes(shape),
    )
    results, calls, at, place = [], [], buffer.pool_layout.staging_at, buffer.placing.place
    with buffer.letting_go(), buffer.steady.watching(key) as remember:
        for i, (r, loan, n) in enumerate(zip(buffer.ranks, handle.loans, handle.num_tokens)):
            shapes = {
                "x": ((n, hidden), dtype),
                "probs": ((n if has_probs else 0, n_numbers), FP32),
            }
            results.append(r.arena.lend("combine result", shapes))
            values = (
                buffer.values(r)
                | values_of(buffer, loan)
                | dict(
                    x=place(r.rank, name, xs[i]),
                    places=[at, 0, at + probs_at, 0],
                    capacity=capacity,
                    probs=place(r.rank, f"probs of {name}", probs[i]) if has_probs else 0,
                    out=results[i].address("x"),
                    out_probs=results[i].address("probs"),
                )
            )
            calls.append((r.rank, values, n, n + handle.num_rows[i]))
        buffer.launch_all(combine_kernel(shape), calls, num_sms)

        names = ("x", "probs") if has_probs else ("x",)

        def arrays_of(loans):
            made = [arrays_in(loan, names) for loan in loans]
            return [x for x, *_ in made], [probs for _, probs in made] if has_probs else None

        memory, n_tokens = [r.arena.memory("combine result", shapes)], n

        def numbers(rows, *more):
            """What of the launch follows from numbers of rows, the last its capacity, if the pool is large enough."""
            *_, capacity = more
            probs_at = align(capacity * shape.row_bytes)
            if not buffer.pool_layout.holds(
                probs_at + 4 * shape.n_meta * capacity * has_probs, flag_rows=capacity
            ):
                return None
            return capacity, at + probs_at, buffer.launches.grid(num_sms, n_tokens + rows)

        remember(memory, results, lambda loan, *_: arrays_of([loan]), numbers)
        return arrays_of(results)
