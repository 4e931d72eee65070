"""SwiGLU on the host, between the experts' two matrix products; does not wait for the number of rows."""

from epmoe import device
from epmoe.host import inputs
from epmoe.host.dispatched import Dispatched, kind_of
from epmoe.host.rank_memory import silu_result
from epmoe_ref.errors import EPValueError

FACTORY = "fused_silu_kernel"


def fused_silu(engine, capacity, gate_up, dispatched, output_format, **limits):
    """Launch SwiGLU for every rank; returns for each an array, or (values, scales) for fp8_blockwise."""
    launches, made, unplaced = [], [], []
    given = inputs.each_rank(engine.world, gate_up=gate_up, dispatched=dispatched)
    for r, (rows, d) in zip(engine.ranks, given):
        if not isinstance(d, Dispatched) or d.round is not None and d.round.plan.r is not r:
            raise EPValueError(
                f"fused_silu of rank {r.rank} was given a {kind_of(d)}: it needs that rank's Dispatched, of this object"
            )
        rows = inputs.gate_up(engine.machine, r.rank, rows, capacity, d)
        n, width = rows.shape[0], rows.shape[1] // 2
        options = dict(intermediate=width, output_format=output_format, **limits)
        key = FACTORY, r.rank, *options.values()
        try:
            if key not in engine.plans:
                engine.plans[key] = engine.prepared(FACTORY, r, 0, options)
        except TypeError as error:
            raise EPValueError(f"fused_silu cannot take {options}: {error}") from error
        loan = r.arena.lend(silu_result(n, width, output_format))
        values = [loan.part(field) for field in loan.fields.values()]
        at = [loan.address(name) for name in loan.fields]
        words = [0, 0, *at, *[0] * (2 - len(at)), n]
        unplaced.append((words, 0, r.rank, "gate_up", rows))
        unplaced.append((words, 1, r.rank, "row_offsets", d.row_offsets))
        launches.append((engine.plans[key], words))
        made.append((loan, values[0] if len(values) == 1 else tuple(values)))
    engine.placing.fill_in(unplaced)
    if engine.rounds.captured_now():
        engine.captured += [loan for loan, _ in made]
    with engine.world.launching(False):
        for launch, words in launches:
            launch.start(*words)
    if device.SIM:
        engine.machine.synchronize()
    results = [result for _, result in made]
    return results if engine.lists else results[0]
