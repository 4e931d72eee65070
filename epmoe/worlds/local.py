"""LocalWorld: all ranks in this process, in the simulator or sharing one GPU. No MPI and no setup."""

from contextlib import contextmanager
from dataclasses import replace

from epmoe_ref.errors import EPValueError

from epmoe import device
from epmoe.worlds.symmetric import SymmetricMemory


class LocalWorld:
    """All n_ranks ranks in this process; arguments and results of an ExpertParallel are lists over ranks.

    simulation: options of the simulator, among them seed (of the schedule; None: round robin) and racecheck=True;
    what is left out comes from EPMOE_SEED and EPMOE_RACECHECK. They have no meaning on a GPU and are refused there.
    """

    lists = True

    def __init__(self, n_ranks, **simulation):
        if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
            raise EPValueError(f"n_ranks={n_ranks!r} must be a whole number, at least 1")
        self.n_ranks, self.ranks = n_ranks, range(n_ranks)
        self.machine = device.machine(n_ranks, **simulation)
        # Split kernels of all ranks run one after another on one GPU stream, so that none waits for one that cannot start.
        self._streams = {r: self.machine.stream(r) for r in (self.ranks if device.SIM else self.ranks[:1])}
        self._fused_streams = self._streams if device.SIM else {r: self.machine.stream(r) for r in self.ranks}

    def __repr__(self):
        return f"LocalWorld({self.n_ranks}) on {self.machine.describe()}"

    def allocate(self, nbytes, name, regions) -> SymmetricMemory:
        """nbytes for every rank; each rank reaches all others' memory."""
        buffers = {rank: self.machine.alloc(nbytes, name, rank, regions=regions) for rank in self.ranks}
        return SymmetricMemory(buffers, [buffers[rank].address for rank in self.ranks])

    def barrier(self):
        """All ranks have come here: in one process they have."""

    def share(self, launch):
        """The LaunchConfig of one rank's fused kernel: all ranks' grids must be resident on the one GPU together."""
        if device.SIM or launch.n_sms is not None:
            return launch
        return replace(launch, n_sms=max(2, self.machine.n_sms // self.n_ranks))

    @contextmanager
    def launching(self, fused):
        """Context of the launches of one call; gives {rank: stream}. All ranks' kernels may wait for each other in it."""
        if device.SIM:
            with self.machine.hold():
                yield self._streams
            return
        main = self._streams[0]
        if not fused:
            yield {rank: main for rank in self.ranks}
            return
        for stream in self._fused_streams.values():
            stream.wait(main)
        yield self._fused_streams
        for stream in self._fused_streams.values():
            main.wait(stream)
