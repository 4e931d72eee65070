"""SwiGLU on the host: the rows between the experts' two matrix products, without waiting for their number."""

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import view
from epmoe.host.dispatched import Dispatched
from epmoe.host.rank_memory import silu_result
from epmoe_ref.errors import EPValueError


class SiluPhase:
    """fused_silu of every rank of this process."""

    def __init__(self, engine, capacity):
        self.engine, self.capacity = engine, capacity

    def __call__(self, gate_up, dispatched, output_format, limit, alpha):
        """A result a rank: an array, or (values, scales) for fp8_blockwise."""
        engine, world = self.engine, self.engine.world
        placed = []
        for r, rows, d in zip(
            engine.ranks,
            inputs.ranks_of(world, "gate_up", gate_up),
            inputs.ranks_of(world, "dispatched", dispatched),
        ):
            if not isinstance(d, Dispatched):
                raise EPValueError(
                    f"fused_silu of rank {r.rank} was given a {type(d).__name__}: "
                    "it needs that rank's Dispatched"
                )
            rows = inputs.gate_up(engine.machine, r.rank, rows, self.capacity, lambda d=d: d.n_rows)
            width = rows.shape[1] // 2
            launch = self._launch(
                r, intermediate=width, output_format=output_format, limit=limit, alpha=alpha
            )
            loan = r.arena.lend(silu_result(rows.shape[0], width, output_format))
            if engine.capture():
                engine.captured.append(loan)
            words = (
                engine.placing.place(r.rank, "gate_up", rows),
                engine.placing.place(r.rank, "row_offsets", view(d.row_offsets, "row_offsets")),
                loan.address("output_tokens"),
                loan.address("output_scales") if len(loan.fields) > 1 else 0,
                rows.shape[0],
            )
            placed.append((launch, words, loan))
        with world.launching(False):
            for launch, words, _ in placed:
                launch.start(*words)
        if device.SIM:
            engine.machine.synchronize()
        made = [_arrays(loan) for _, _, loan in placed]
        return made if engine.lists else made[0]

    def _launch(self, r, **options):
        """What launches the kernel of a rank; prepared once."""
        key = "fused_silu_kernel", r.rank, *options.values()
        launch = self.engine.plans.get(key)
        if launch is None:
            made = self.engine.prepared("fused_silu_kernel", r, 0, {}, options)
            launch = self.engine.enter(key, made)
        return launch


def _arrays(loan):
    values = [loan.array(name) for name in loan.fields]
    return values[0] if len(values) == 1 else tuple(values)
