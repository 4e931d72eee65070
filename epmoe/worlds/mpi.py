"""MPIWorld: one rank a process, on one host, started by mpirun.

With GPUs, peers reach each other's memory through CUDA IPC. Without, they map the same files, and each process runs the
simulator for its own rank.
"""

import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict

from epmoe import device
from epmoe.device.cuda_stream import handle_of
from epmoe.provenance import install
from epmoe.worlds import agreement, launcher
from epmoe.worlds.exchange import Exchange
from epmoe.worlds.simulation import checked
from epmoe.worlds.time_limit import seconds
from epmoe_ref.errors import EPValueError, UnavailableError


class MPIWorld:
    """The ranks of an MPI communicator (default COMM_WORLD), all on one host. This process is one of them.

    Arguments and results of an ExpertParallel are this rank's arrays. Start programs with
    `mpirun -n N python -m mpi4py program.py`, so that an error in one rank ends all ranks.

    gpu: number of this rank's GPU among those that CUDA_VISIBLE_DEVICES shows; default: the rank's number on the host.
    stream: as in LocalWorld. timeout [s]: how long to wait for all ranks. simulation: seed of this rank's schedule.
    """

    lists = False
    own_options: tuple[str, ...] = "comm", "gpu", "stream", "timeout"

    def __init__(self, comm=None, *, gpu=None, stream=None, timeout=60.0, **simulation):
        simulation, timeout = checked(self, self.own_options, simulation), seconds("timeout", timeout)
        MPI = _mpi()
        launcher.check_size(MPI.COMM_WORLD.Get_size(), launcher.library(MPI.Get_library_version()))
        if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
            raise EPValueError(
                f"comm={comm!r} must be an intracommunicator of mpi4py with this process, or be left out for COMM_WORLD; "
                "mpirun -n chooses the number of ranks"
            )
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self.exchange = Exchange(self.comm, MPI)
        self.rank, self.n_ranks = self.exchange.rank, self.exchange.size
        self.ranks = range(self.rank, self.rank + 1)
        kind = {"EPMOE_DEVICE": "sim" if device.SIM else "gpu"}
        agreement.same("simulator or GPU", self.exchange.gather("meeting", kind, timeout))
        # all ranks are here, so no rank waits long
        self.host = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._check_hosts(timeout)
        if device.SIM:
            self._simulate(simulation)
        else:
            self._take_gpu(gpu, handle_of(stream), timeout)

    def _check_hosts(self, timeout):
        if self.host.Get_size() != self.n_ranks:
            raise UnavailableError(
                f"{self.host.Get_size()} of {self.n_ranks} ranks are on rank {self.rank}'s host: "
                "an MPIWorld is one host, whose processes can map each other's memory; several "
                "hosts need a ShmemWorld"
            )

    def _simulate(self, simulation):
        self.machine = device.machine(self.n_ranks, rank=self.rank, **simulation)
        if self.machine.racecheck:
            raise EPValueError(
                "racecheck sees the accesses of one process only: use a LocalWorld, where all ranks "
                "are in it (a command: --world local, without mpirun)"
            )
        self._streams = {self.rank: self.machine.stream(self.rank)}

    def _take_gpu(self, gpu, stream, timeout):
        from epmoe.worlds import ipc_memory

        count = ipc_memory.gpu_count()
        if gpu is not None and not 0 <= gpu < count:
            raise EPValueError(
                f"gpu={gpu}: rank {self.rank} sees {count} GPUs, 0 to {count - 1} (CUDA_VISIBLE_DEVICES)"
            )
        self.machine = device.machine(
            self.n_ranks, rank=self.rank, ordinal=self.host.Get_rank() % count if gpu is None else gpu
        )
        self._streams = {self.rank: self.machine.stream(self.rank, handle=stream)}
        taken = Counter(self.exchange.gather("devices", ipc_memory.gpu_uuid(self.machine.ordinal), timeout))
        if self.rank == 0 and len(taken) < self.n_ranks:
            warnings.warn(
                f"{self.n_ranks} ranks share {len(taken)} GPUs: processes on one GPU take turns, so "
                "every wait for each other costs milliseconds",
                RuntimeWarning,
                stacklevel=3,
            )

    def __repr__(self):
        return f"{type(self).__name__} rank {self.rank} of {self.n_ranks} on {self.machine.describe()}"

    def size(self):
        """n_ranks. Torch's process groups use this name, and Megatron's dispatcher calls it."""
        return self.n_ranks

    def agree(self, cfg, timeout, **options):
        """Raise, on every rank, unless all ranks gave the same EPConfig and options of ExpertParallel; collective."""
        of_ranks = self.exchange.gather("configuration", (asdict(cfg), options), timeout)
        agreement.same("EPConfig", [fields for fields, _ in of_ranks])
        agreement.same("ExpertParallel", [options for _, options in of_ranks])

    def same(self, what, facts, timeout):
        """Raise, on every rank, unless all ranks have the same facts, a dict; collective. what: their name in errors."""
        agreement.same(what, self.exchange.gather("configuration", facts, timeout))

    def allocate(self, nbytes, name, regions, timeout):
        """nbytes for this rank, and this process's addresses of all ranks' memory; collective."""
        if device.SIM:
            from epmoe.worlds.mapped_memory import MappedMemory as Memory
        else:
            from epmoe.worlds.ipc_memory import IpcMemory as Memory
        return Memory(self, nbytes, name, regions, timeout)

    def barrier(self, occasion, timeout):
        """Return when all ranks have called it. PeerTimeout names the ranks that have not."""
        self.exchange.gather(occasion, None, timeout)

    def tell(self, value, timeout):
        """[the value of each rank's process]; collective."""
        return self.exchange.gather("telling", value, timeout)

    def hear(self, value, timeout):
        """{rank: value} of this rank and the ranks whose calls also failed. Waits for them, at most until timeout."""
        return self.exchange.hear("late calls", value, timeout)

    def told_already(self):
        """{rank: value} of the peers that have already called the next tell(). Does not wait."""
        return self.exchange.came("telling")

    def stream_of(self, rank, fused=False):
        """The stream that orders this rank's work."""
        return self._streams[rank]

    def share(self, launch):
        """The LaunchConfig of the fused kernel. The rank has a whole device, alone or in turns with others."""
        return launch

    def launching(self, fused):
        """Context of the launches of one call."""
        return self.machine.hold() if device.SIM else nullcontext()


def _mpi():
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no MPI library
        why = str(error).partition("\n")[0]
        raise UnavailableError(
            f"MPI cannot be used ({why}): {install('mpi')}, or load your cluster's MPI module"
        ) from error
    return MPI
