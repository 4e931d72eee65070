"""SwiGLU on the host: the rows between the experts' two matrix products, without waiting for their number."""

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import view
from epmoe.host.dispatched import Dispatched
from epmoe.host.engine import Plan
from epmoe.host.rank_memory import silu_result
from epmoe_ref.errors import EPValueError

FACTORY = "fused_silu_kernel"


class SiluPhase:
    """fused_silu of every rank of this process."""

    def __init__(self, engine, capacity):
        self.engine, self.capacity = engine, capacity

    def __call__(self, gate_up, dispatched, output_format, limit, alpha):
        """A result a rank: an array, or (values, scales) for fp8_blockwise."""
        engine, launches, made = self.engine, [], []
        given = inputs.each_rank(engine.world, gate_up=gate_up, dispatched=dispatched)
        for r, (rows, d) in zip(engine.ranks, given):
            if not isinstance(d, Dispatched):
                raise EPValueError(
                    f"fused_silu of rank {r.rank} was given a {type(d).__name__}: "
                    "it needs that rank's Dispatched"
                )
            rows = inputs.gate_up(engine.machine, r.rank, rows, self.capacity, lambda d=d: d.n_rows)
            n, width = rows.shape[0], rows.shape[1] // 2
            how = dict(intermediate=width, output_format=output_format, limit=limit, alpha=alpha)
            plan = self._plan(r, **how)
            loan = r.arena.lend(silu_result(n, width, output_format))
            if engine.capture():
                engine.captured.append(loan)
            place, offsets = engine.placing.place, d.row_offsets
            words = (
                place(r.rank, "gate_up", rows),
                place(r.rank, "row_offsets", view(offsets, "row_offsets")),
                loan.address("output_tokens"),
                loan.address("output_scales") if len(loan.fields) > 1 else 0,
                n,
            )
            launches.append((plan[FACTORY], words))
            values = loan.arrays(loan.fields)
            made.append(values[0] if len(values) == 1 else tuple(values))
        with engine.world.launching(False):
            for launch, words in launches:
                launch.start(*words)
        if device.SIM:
            engine.machine.synchronize()
        return made if engine.lists else made[0]

    def _plan(self, r, **options):
        key = FACTORY, r.rank, *options.values()
        if key not in self.engine.plans:
            how = {}, options, {}
            self.engine.enter(key, Plan(self.engine, r, 0, lambda factory: how))
        return self.engine.plans[key]
