"""Iterations of a contender's phases into rows: microseconds of the slowest rank, bytes, floor, host cost."""

import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.clock import Clock

WARM_UPS = 5
DRAIN = 10      # iterations


@dataclass(frozen=True)
class Row:
    """One phase of one contender at one shape; microseconds are of the slowest rank, over the iterations."""

    kernels: str
    phase: str
    tokens: int
    hidden: int
    experts: int
    top_k: int
    format: str
    routing: str
    graph: bool
    us: float
    p20_us: float
    p80_us: float
    iterations: int
    bytes: int
    gbps: float
    floor_us: float
    to_floor: float
    host_us: float

    def asdict(self):
        """For JSON."""
        return asdict(self)


def rows(contender, line, iterations, link_gbps, *, warm_ups=WARM_UPS, timeout=60.0):
    """[a Row for each phase]; collective."""
    world, clock = contender.world, Clock(contender.world.machine, contender.stream)
    host = {phase: [] for phase in contender.phases}
    for i in range(warm_ups + iterations):
        if i == warm_ups:
            clock.times_us()
        if i % DRAIN == 0:
            clock.machine.synchronize()     # a full queue would hold the host up, and its time is measured too
        for phase in contender.phases:
            line.align(contender.stream)
            clock.start()
            begin = time.perf_counter()
            contender.launch(phase)
            if i >= warm_ups:
                host[phase].append(1e6 * (time.perf_counter() - begin))
            clock.stop()
    times = clock.times_us()
    contender.check()
    line.check()
    n = len(contender.phases)
    of_ranks = world.tell((times, {phase: float(np.median(us)) for phase, us in host.items()}), timeout)
    slowest = np.max([t for t, _ in of_ranks], axis=0)
    return [_row(contender, phase, slowest[at::n], max(h[phase] for _, h in of_ranks), link_gbps)
            for at, phase in enumerate(contender.phases)]


def _row(contender, phase, us, host_us, link_gbps):
    s, nbytes = contender.shape, contender.bytes[phase]
    low, middle, high = (float(v) for v in np.percentile(us, (20, 50, 80)))
    floor = nbytes / link_gbps / 1e3
    return Row(contender.name, phase, s.tokens, s.hidden, s.experts, s.top_k, s.format, s.routing,
               getattr(contender, "graph", False), round(middle, 2), round(low, 2), round(high, 2), len(us), nbytes,
               round(nbytes / middle / 1e3, 1), round(floor, 2), round(middle / floor, 2) if floor else None,
               round(host_us, 1))
