"""The rank of this process, for implementations with one rank a process: from mpirun, torchrun, or alone.

Each process can compute the inputs of all ranks and the reference's results. Ranks communicate only to agree on the
verdict.
"""

import os
import shlex
import sys
from functools import lru_cache

import numpy as np

from epmoe.worlds import launcher
from epmoe_ref.errors import EPValueError, UnavailableError

N_RANKS = 4  # of a world in one process, by default
TIMEOUT_S = 1800  # seconds for all ranks to arrive: some compile while others wait

MPI_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")


class WholeWorld:
    """All ranks in this process."""

    def __init__(self, n_ranks):
        self.size, self.here = n_ranks, range(n_ranks)

    def gather(self, value):
        """[value]: there is one process."""
        return [value]

    def again(self, name, case):
        """The command that runs this case again."""
        return f"epmoe check {name} --only {shlex.quote(case)} --ranks {self.size}"

    def close(self):
        """Nothing to leave."""


class OneRank:
    """One rank a process. exchange: an Exchange or a StoreExchange."""

    def __init__(self, exchange):
        self._exchange, self.size, self.here = exchange, exchange.size, (exchange.rank,)

    def gather(self, value):
        """The values of all ranks, plain data, on all ranks; collective."""
        return self._exchange.gather("telling", value, TIMEOUT_S)

    def again(self, name, case):
        """The command that runs this case again."""
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        launcher = f"torchrun --nproc-per-node {self.size}" if torchrun else f"mpirun -n {self.size} python -m mpi4py"
        return f"{launcher} -m epmoe check {name} --only {shlex.quote(case)}"

    def close(self):
        """Leave torch's process group, as torch requires, if there is one. MPI ends with the process."""
        if "torch.distributed" in sys.modules:
            dist = sys.modules["torch.distributed"]
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()


def ranks_of(implementation, n_ranks, name=None):
    """The ranks that this process runs: all n_ranks of them, or its own with one rank a process.

    n_ranks: None: 4, or as many as there are processes. name: the implementation's name in messages; default: the class's.
    """
    if implementation.per_rank:
        ranks = this_rank(name or implementation.__name__)
        if n_ranks not in (None, ranks.size):
            raise EPValueError(
                f"{n_ranks} ranks are wanted, and {ranks.size} processes were started, each of them a rank: leave the "
                "number of ranks out, or start as many"
            )
        return ranks
    return WholeWorld(N_RANKS if n_ranks is None else n_ranks)


def started_by_mpirun():
    """Whether mpirun started this process."""
    return any(name in os.environ for name in MPI_VARIABLES)


def started_as_rank():
    """Whether a launcher started this process, perhaps alone."""
    return started_by_mpirun() or "TORCHELASTIC_RUN_ID" in os.environ or started_with_others()


def started_with_others():
    """Whether mpirun or torchrun started this process as one of several."""
    return launched()[0] > 1


def launched():
    """(number of processes, name of the launcher that started them); the number is 1 if this process is alone."""
    of_torchrun = launcher.number("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    size, by = launcher.launched_size()
    return max((of_torchrun or 1, "torchrun"), (size or 1, by or ""))


def process_number():
    """The number that mpirun or torchrun gave to this process; 0 if it was started alone."""
    numbers = map(launcher.number, (*MPI_VARIABLES, "RANK"))
    return next((number for number in numbers if number is not None), 0)


def this_rank(name):
    """This process's rank under mpirun or torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch_process_group()
        import torch.distributed as dist

        from epmoe.torch.store_exchange import StoreExchange, count, store_of

        exchange = StoreExchange(store_of(dist.group.WORLD), dist.get_rank(), dist.get_world_size())
        count(dist.group.WORLD)
        return OneRank(exchange)
    if started_by_mpirun():
        return rank_of_mpi()
    raise UnavailableError(
        f"{name} has one rank a process: start it with `torchrun --nproc-per-node N -m epmoe check "
        f"{name}` or `mpirun -n N python -m mpi4py -m epmoe check {name}`"
    )


@lru_cache(None)
def rank_of_mpi():
    """This process's rank under mpirun. It has a communicator of its own, since implementations use COMM_WORLD."""
    from mpi4py import MPI

    from epmoe.worlds.exchange import Exchange

    return OneRank(Exchange(MPI.COMM_WORLD.Dup(), MPI))


def torch_process_group():
    """torch.distributed's default group over all ranks, made once: NCCL on this rank's GPU, or gloo without GPUs."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise UnavailableError("torch is not installed: pip install torch") from None
    if dist.is_initialized():
        return
    where = {}
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        where = _address_through_mpi()
    local_rank = int(os.environ.get("LOCAL_RANK", where.get("rank", 0)))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **where)


def _address_through_mpi():
    import socket

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{socket.gethostname()}:{probe.getsockname()[1]}".encode()
    told = np.zeros(300, np.uint8)  # a host's name has at most 255 letters
    told[: len(address)] = np.frombuffer(address, np.uint8)
    comm.Bcast(told)
    where = told.tobytes().rstrip(b"\0").decode()
    return dict(init_method=f"tcp://{where}", rank=comm.rank, world_size=comm.size)
