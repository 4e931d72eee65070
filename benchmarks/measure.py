"""Runs iterations of a contender's phases and makes rows: microseconds of the slowest rank, bytes, floor, host cost."""

import time
from dataclasses import asdict, astuple, dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from benchmarks.clock import Clock
from benchmarks.host_time import HostTime, OfHost
from benchmarks.startline import LeftBehind
from epmoe import device
from epmoe_ref.errors import EPError, PeerTimeout

WARM_UPS = 1 if device.SIM else 5
DRAIN = 10  # iterations
TIMEOUT_S = 120  # for all ranks to reach the end of an attempt: longer than the waits inside it


@dataclass(frozen=True)
class Row:
    """One phase of one contender at one shape. Microseconds are of the slowest rank, over the iterations.

    sms: the multiprocessors that it may use, None for all. floor_us: bytes over the link's bandwidth. host_us: of a
    call, on the rank where it took longest; piece_us: of the fixed piece of Python there (host_time.py).
    """

    kernels: str
    phase: str
    tokens: int
    hidden: int
    experts: int
    top_k: int
    format: str
    routing: str
    graph: bool
    sms: int | None
    us: float
    p20_us: float
    p80_us: float
    iterations: int
    bytes: int
    gbps: float
    floor_us: float
    to_floor: float
    host_us: float
    piece_us: float

    def asdict(self):
        """The row as a dict, for JSON."""
        return asdict(self)


class Refused(EPError):
    """A case that could not be run on some rank. All ranks know about it."""


def together(world, attempt):
    """[the result of attempt() on each rank], or Refused on all ranks if it failed on one; collective."""
    mine = error = failure = None
    try:
        mine = attempt()
    except Exception as failed:  # whatever it is, the other ranks must not be left waiting
        failure, error = failed, (_follows(failed), f"{type(failed).__name__}: {failed}")
    try:
        told = world.tell((error, mine), TIMEOUT_S)
    except PeerTimeout as late:
        # the others may wait on their devices for work that this rank did not launch
        if failure is None:
            raise
        raise PeerTimeout(f"{late}; before that, here: {error[1]}") from failure
    failed = [(error[0], rank, error[1]) for rank, (error, _) in enumerate(told) if error]
    if failed:
        _, rank, why = min(failed)
        raise Refused(why if len(told) == 1 else f"rank {rank}: {why}")
    return [value for _, value in told]


def _follows(error):
    """How surely an error follows from another rank's failure: 2 if left behind, 1 if it waited, else 0."""
    return isinstance(error, PeerTimeout) + isinstance(error, LeftBehind)


def failed_peer(world):
    """A rank that reported its failure in together() while this one is still at its attempt; None if there is none."""
    return min([rank for rank, (error, _) in world.told_already().items() if error], default=None)


def times(contender, line, iterations, warm_ups=WARM_UPS):
    """(microseconds [iterations x phases] on this rank, {phase: OfHost})."""
    clock, host = Clock(contender.world.machine, contender.stream), HostTime(contender.phases)

    def drain():
        line.drain(contender.stream, partial(failed_peer, contender.world))
        line.check()

    for i in range(warm_ups + iterations):
        if i == warm_ups:
            drain()
            clock.times_us()
            host = HostTime(contender.phases)
        if i % DRAIN == 0:
            drain()  # a full queue would hold up the host, and its time is measured too
        for phase in contender.phases:
            line.align(contender.stream)
            clock.start()
            begin = time.perf_counter()
            contender.launch(phase)
            end = time.perf_counter()
            clock.stop()
            host.add(phase, end - begin)
    of_host = host.of_phases()
    line.drain(contender.stream, partial(failed_peer, contender.world))
    us = clock.times_us()
    if getattr(contender, "waits", False):  # up to here also for the start line
        of_host = _of_host_alone(contender, iterations)
    contender.check()
    line.check()
    return us, of_host


def _of_host_alone(contender, iterations):
    """{phase: OfHost} of this many calls, each with nothing on the stream when it begins."""
    host = HostTime(contender.phases)
    for phase in contender.phases:
        for _ in range(iterations):
            contender.world.machine.synchronize()
            begin = time.perf_counter()
            contender.launch(phase)
            host.add(phase, time.perf_counter() - begin)
    return host.of_phases()


def rows(contender, line, iterations, link_gbps, *, sms=None, graph=False):
    """[a Row for each phase]; collective. Raises Refused on all ranks alike."""
    world, n = contender.world, len(contender.phases)

    def attempt():
        try:
            us, of_host = times(contender, line, iterations)
            return us, {phase: vars(one) for phase, one in of_host.items()}
        except LeftBehind:
            raise
        except Exception:
            line.give_up()  # the others wait for this rank on their devices
            raise

    try:
        of_ranks = together(world, attempt)
    except Refused:
        line.meet_again()
        raise
    slowest = np.max([us for us, _ in of_ranks], axis=0)
    of_host = {
        phase: max((OfHost(**host[phase]) for _, host in of_ranks), key=attrgetter("us")) for phase in contender.phases
    }
    return [
        _row(contender, phase, slowest[at::n], of_host[phase], link_gbps, sms, graph)
        for at, phase in enumerate(contender.phases)
    ]


def _row(contender, phase, us, host, link_gbps, sms, graph):
    s, nbytes = contender.shape, contender.bytes[phase]
    low, middle, high = (float(v) for v in np.percentile(us, (20, 50, 80)))
    floor = nbytes / link_gbps / 1e3
    return Row(
        contender.name,
        phase,
        s.tokens,
        s.hidden,
        s.experts,
        s.top_k,
        s.format,
        s.routing,
        graph,
        sms,
        round(middle, 2),
        round(low, 2),
        round(high, 2),
        len(us),
        nbytes,
        round(nbytes / middle / 1e3, 1),
        round(floor, 2),
        round(middle / floor, 2) if floor else None,
        *astuple(host),
    )
