"""This project's kernels with one rank a process: an MPIWorld, on GPUs or with a simulator in each process.

mpirun -n 4 python -m mpi4py -m epmoe check                 # all of them
mpirun -n 4 python -m mpi4py -m epmoe check mpi_rows
"""

from epmoe import MPIWorld
from epmoe.check.adapters import fused_a2a, kernels
from epmoe.check.implementation import OPTIONS


class _OverMPIWorld:
    """One rank a process. All ranks make, use and close it together."""

    per_rank = True

    def new_world(self, per_rank):
        """This process's rank of the communicator."""
        return MPIWorld()


class Kernels(_OverMPIWorld, kernels.Kernels):
    """The split kernels. p2p worlds would need a ShmemWorld, and an MPIWorld is none."""

    options = OPTIONS - {"use_shmem"}


class FusedKernels(Kernels):
    """The fused kernels."""

    fused = True


class PlainKernels(_OverMPIWorld, kernels.PlainKernels):
    """The plain kernels. Their memory is compared word by word."""

    options = OPTIONS - {"use_shmem"}


class Rows(_OverMPIWorld, fused_a2a.Rows):
    """FusedDispatch and FusedCombine."""


class Hybrid(_OverMPIWorld, fused_a2a.Hybrid):
    """HybridEPDispatch and HybridEPCombine."""
