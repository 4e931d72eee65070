"""LocalWorld: all ranks in this process, in the simulator or sharing one GPU. No MPI and no setup."""

from contextlib import contextmanager
from dataclasses import replace

from epmoe import device
from epmoe.device.cuda_stream import handle_of
from epmoe.worlds.simulation import checked, is_whole
from epmoe.worlds.symmetric import SymmetricMemory
from epmoe_ref.config import MAX_EXPERTS
from epmoe_ref.errors import EPValueError


class LocalWorld:
    """All n_ranks ranks in this process. Arguments and results of an ExpertParallel are lists over ranks.

    stream: on a GPU, the stream that orders all work (a handle, or a stream of torch, CuPy or cuda.core);
    default: the legacy default stream, as in torch and CuPy.
    simulation: options of the simulator, such as seed (of the schedule; None: round robin) and racecheck=True. Their
    defaults are EPMOE_SEED and EPMOE_RACECHECK. A GPU ignores them.
    """

    lists = True
    shmem = device.SIM  # NVSHMEM has one rank a process

    def __init__(self, n_ranks, *, stream=None, **simulation):
        if not is_whole(n_ranks) or n_ranks < 1:
            raise EPValueError(f"n_ranks={n_ranks!r} must be a whole number, at least 1")
        if n_ranks > MAX_EXPERTS:
            raise EPValueError(
                f"n_ranks={n_ranks} must be at most {MAX_EXPERTS}, the most experts: each rank has one at least"
            )
        n_ranks = int(n_ranks)
        self.n_ranks, self.ranks = n_ranks, range(n_ranks)
        self.machine = device.machine(n_ranks, **checked(self, ("stream",), simulation))
        if device.SIM:
            self._streams = self._fused_streams = {rank: self.machine.stream(rank) for rank in self.ranks}
            return
        # Split kernels of all ranks run one after another on the caller's stream, so none waits for one that cannot
        # start. Fused kernels need a stream each to run at the same time.
        main = self.machine.stream(0, handle=handle_of(stream))
        self._streams = {rank: main for rank in self.ranks}
        self._fused_streams = {rank: self.machine.stream(rank) for rank in self.ranks}

    def __repr__(self):
        return f"LocalWorld({self.n_ranks}) on {self.machine.describe()}"

    def size(self):
        """n_ranks. Torch's process groups use this name, and Megatron's dispatcher calls it."""
        return self.n_ranks

    def agree(self, cfg, timeout, **options):
        """All ranks share one configuration, so there is nothing to compare."""

    def same(self, what, facts, timeout):
        """All ranks got their facts in one call, so there is nothing to compare."""

    def allocate(self, nbytes, name, regions, timeout) -> SymmetricMemory:
        """nbytes for every rank. Each rank can access the memory of all others."""
        buffers = {rank: self.machine.alloc(nbytes, name, rank, regions=regions) for rank in self.ranks}
        return SymmetricMemory(buffers, [buffers[rank].address for rank in self.ranks])

    def connect(self, memory):
        """Connect the ranks' allocations by SHMEM, over the simulator's network."""
        self.machine.network.connect(memory.addresses, memory.buffers[0].nbytes)

    def disconnect(self, memory):
        """End one connect()."""
        self.machine.network.disconnect(memory.addresses)

    def barrier(self, occasion, timeout):
        """Deliver everything on the simulator's network. There is no other process to wait for."""
        if device.SIM:
            self.machine.network.settle()

    def tell(self, value, timeout):
        """[value]: there is no other process."""
        return [value]

    def stream_of(self, rank, fused=False):
        """The stream that orders a rank's work, or on a GPU the one of its fused kernels."""
        return (self._fused_streams if fused else self._streams)[rank]

    def share(self, launch):
        """The LaunchConfig of one rank's fused kernel. All ranks' grids must be resident on the one GPU together."""
        if device.SIM:
            return launch
        most = self.machine.n_sms // self.n_ranks
        if launch.n_sms is None:
            return replace(launch, n_sms=max(2, most))
        if launch.n_sms > most:
            raise EPValueError(
                f"n_sms={launch.n_sms} for each of {self.n_ranks} ranks: fused kernels of all ranks "
                f"must be resident on one GPU of {self.machine.n_sms} multiprocessors: at most {most}, "
                "or fused=False"
            )
        return launch

    @contextmanager
    def launching(self, fused):
        """Context of one call's launches. Kernels of all ranks inside may wait for each other."""
        if device.SIM:
            with self.machine.hold():
                yield
            return
        if not fused:
            yield
            return
        main = self._streams[0]
        for stream in self._fused_streams.values():
            stream.wait(main)
        with self.machine.hold():  # all are compiled before the first begins to wait
            yield
        for stream in self._fused_streams.values():
            main.wait(stream)
