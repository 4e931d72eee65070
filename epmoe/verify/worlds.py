"""Chooses the world of a verification: all ranks in this process, or under mpirun one rank a process."""

import sys

from epmoe import device
from epmoe.worlds import launcher
from epmoe.worlds.local import LocalWorld
from epmoe_ref.errors import EPValueError

VIRTUAL_RANKS = 4  # of a verification in one process


def between(p2p_world_size, skip_a2a):
    """The EPConfig options for how ranks reach each other: SHMEM between p2p worlds of a given size."""
    if p2p_world_size is None:
        return {}
    return dict(p2p_world_size=p2p_world_size, use_shmem=not skip_a2a)


class Worlds:
    """Makes the worlds of one verification. Under mpirun only rank 0 (`prints`) prints.

    kind: "local", "mpi", or "auto": MPI if a launcher started several processes or `python -m mpi4py` this one.
    p2p_world_size: ranks of a p2p world, with SHMEM between p2p worlds; None: one p2p world.
    """

    def __init__(self, kind, racecheck=False, p2p_world_size=None):
        self.p2p_world_size = p2p_world_size
        if racecheck and not device.SIM:
            raise EPValueError("--racecheck needs the simulator, and a GPU is used: set EPMOE_DEVICE=sim")
        self._options = {"racecheck": True} if racecheck else {}
        several = (launcher.launched_size()[0] or 1) > 1 or "mpi4py.run" in sys.modules
        self.mpi = kind == "mpi" or kind == "auto" and several
        self.rank, self.n_ranks = 0, VIRTUAL_RANKS
        if self.mpi:
            self._world = self._mpi_world()
            self.rank, self.n_ranks = self._world.rank, self._world.n_ranks

    @property
    def prints(self):
        """Whether this process prints. Only rank 0 does."""
        return self.rank == 0

    def make(self, n_ranks, seed):
        """A world of n_ranks. seed: of the simulator's schedule."""
        options = self._options | {"seed": seed} if device.SIM else {}
        if not self.mpi:
            return LocalWorld(n_ranks, **options)
        if n_ranks != self.n_ranks:
            raise EPValueError(
                f"--ranks {n_ranks}: MPI has {self.n_ranks} ranks here; leave --ranks out, or use mpirun -n {n_ranks}"
            )
        if device.SIM and self._world.machine.seed != seed:
            self._world = self._mpi_world(seed=seed)
        return self._world

    def _mpi_world(self, **options):
        if self.p2p_world_size is not None:
            from epmoe.worlds.shmem import ShmemWorld

            return ShmemWorld(p2p_world_size=self.p2p_world_size, **self._options, **options)
        from epmoe.worlds.mpi import MPIWorld

        return MPIWorld(**self._options, **options)
