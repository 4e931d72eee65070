"""ShmemWorld: one rank a process, in p2p worlds that exchange messages by SHMEM, started by mpirun.

With GPUs, the ranks' memory is in NVSHMEM's symmetric heap. Peers in a p2p world store into each other's memory
directly. Messages to other p2p worlds use NVSHMEM puts and signals. Without GPUs, the processes map the same
memory, and each runs the simulator, with a simulated network, for its own rank.
"""

from epmoe import device
from epmoe.worlds.mpi import MPIWorld
from epmoe.worlds.simulation import is_whole
from epmoe_ref.config import MAX_GPUS_PER_NODE
from epmoe_ref.errors import EPValueError, UnavailableError


class ShmemWorld(MPIWorld):
    """The ranks of an MPI communicator (default COMM_WORLD) on one or several hosts. This process is one of them.

    p2p_world_size: number of consecutive ranks, on one host, that write each other's memory directly. It must equal the
    EPConfig's (with use_shmem=True). Default: the ranks of a host, at most 8. Everything else is as in MPIWorld.
    The first ShmemWorld of a process starts NVSHMEM over MPI. Later ones use it too.
    """

    shmem = True
    own_options = "comm", "p2p_world_size", "gpu", "stream", "timeout"

    def __init__(self, comm=None, *, p2p_world_size=None, gpu=None, stream=None, timeout=60.0, **simulation):
        self.p2p_world_size = p2p_world_size
        super().__init__(comm, gpu=gpu, stream=stream, timeout=timeout, **simulation)
        if not device.SIM:
            from epmoe.worlds import nvshmem_heap

            nvshmem_heap.start(self, timeout)

    def _check_hosts(self, timeout):
        """Check that each p2p world is on one host; choose the default size."""
        told = self.exchange.gather("telling", _host_number(self.host), timeout)
        # by rank: all of its host
        hosts = [[rank for rank, one in enumerate(told) if one == host] for host in told]
        if device.SIM and len(hosts[0]) != self.n_ranks:
            raise UnavailableError(
                f"{len(hosts[0])} of {self.n_ranks} ranks are on rank 0's host: the simulator's "
                "processes map each other's memory, so all of them must be on one"
            )
        size = self.p2p_world_size
        if size is None:
            size = self.p2p_world_size = largest_world(hosts)
        if not is_whole(size) or size < 1 or self.n_ranks % size:
            raise EPValueError(f"p2p_world_size={size!r} must be a whole number that divides the {self.n_ranks} ranks")
        self.p2p_world_size = int(size)
        broken = split_world(hosts, size)
        if broken is not None:
            raise EPValueError(
                f"p2p_world_size={size}: ranks {broken} to {broken + size - 1} are not on one host; "
                f"{largest_world(hosts)} would fit, or start consecutive ranks on each host"
            )

    def agree(self, cfg, timeout, **options):
        """Raise, on every rank, unless all ranks gave the same configuration, with this world's size; collective."""
        super().agree(cfg, timeout, **options)
        if cfg.p2p_world_size != self.p2p_world_size:
            raise EPValueError(
                f"EPConfig.p2p_world_size={cfg.p2p_world_size} must equal the ShmemWorld's "
                f"p2p_world_size={self.p2p_world_size}"
            )

    def allocate(self, nbytes, name, regions, timeout):
        """nbytes for this rank in symmetric memory, and the addresses of its p2p world's ranks; collective."""
        if device.SIM:
            return super().allocate(nbytes, name, regions, timeout)
        from epmoe.worlds.nvshmem_heap import HeapMemory

        return HeapMemory(self, nbytes, name, regions, timeout)

    def connect(self, memory):
        """Connect the ranks' allocations by SHMEM. Only the simulator's network needs their addresses."""
        if device.SIM:
            self.machine.network.connect(memory.addresses, memory.buffers[self.rank].nbytes)

    def disconnect(self, memory):
        """End one connect()."""
        if device.SIM:
            self.machine.network.disconnect(memory.addresses)

    def barrier(self, occasion, timeout):
        """Return when all ranks have called it and everything that they sent has arrived."""
        if not device.SIM:
            from epmoe.worlds import nvshmem_heap

            nvshmem_heap.complete(self)
        super().barrier(occasion, timeout)


def _host_number(host):
    """The lowest rank of COMM_WORLD on this host. Uses MPI's reduction, which unpickles nothing."""
    import numpy as np
    from mpi4py import MPI

    lowest = np.array([MPI.COMM_WORLD.Get_rank()])
    host.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    return int(lowest[0])


def split_world(hosts, size):
    """First rank of a p2p world that is not on one host, or None. hosts: for every rank, the ranks of its host."""
    return next(
        (first for first in range(0, len(hosts), size) if not set(range(first, first + size)) <= set(hosts[first])),
        None,
    )


def largest_world(hosts):
    """The largest size at which every p2p world is on one host."""
    return next(
        size
        for size in range(min(len(hosts), MAX_GPUS_PER_NODE), 0, -1)
        if len(hosts) % size == 0 and split_world(hosts, size) is None
    )
