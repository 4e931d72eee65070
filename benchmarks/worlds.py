"""The ranks of a benchmark: one GPU each under mpirun, else virtual ones on one GPU or in the simulator."""

import sys

from epmoe import device
from epmoe.worlds import launcher
from epmoe.worlds.local import LocalWorld


def started_by_mpi():
    """Whether this process is one of several, or was started by `python -m mpi4py`."""
    return (launcher.launched_size()[0] or 1) > 1 or "mpi4py.run" in sys.modules


def make(n_virtual_ranks):
    """A world whose ranks use a stream of their own (the default stream cannot be captured into a graph)."""
    if not started_by_mpi():
        return LocalWorld(n_virtual_ranks) if device.SIM else LocalWorld(n_virtual_ranks, stream=_new_stream(None))
    from epmoe.worlds.mpi import MPIWorld

    if device.SIM:
        return MPIWorld()
    from mpi4py import MPI

    from epmoe.worlds.ipc_memory import gpu_count

    gpu = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank() % gpu_count()
    return MPIWorld(gpu=gpu, stream=_new_stream(gpu))


def _new_stream(gpu):
    from numba import cuda

    from epmoe.device.gpu_machine import new_stream

    if gpu is not None:
        cuda.select_device(gpu)
    cuda.current_context()
    return int(new_stream())
