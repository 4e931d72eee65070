"""Reads the launcher's environment variables: under mpirun or srun, how many processes there are."""

import os

from epmoe_ref.errors import UnavailableError

# Variables that hold the number of processes, and the launcher that sets each.
SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpirun, or srun --mpi=pmi2",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "PALS_SIZE": "Cray's mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}
REMEDIES = (
    "Start it with the mpirun of the MPI library that mpi4py loads (`epmoe doctor` names both; the extra `mpi` installs one "
    "next to this Python). Under Slurm try srun --mpi=pmix or --mpi=pmi2"
)


def number(name):
    """The whole number that a variable holds; None if it holds none."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


def launched_size():
    """(number of processes, name of the launcher); (None, None) if no launcher started this process."""
    for name, launcher in SIZES.items():
        size = number(name)
        if size is not None:
            return size, launcher
    rank = number("PMIX_RANK")  # this launcher gives no size
    if rank is not None:
        return rank + 1, "a PMIx launcher (srun --mpi=pmix)"  # there may be more
    return None, None


def library(version):
    """The name and number that MPI's text about its version begins with, such as "Open MPI v5.0.11"."""
    return " ".join(version.strip("\0 ").partition("\n")[0].partition(",")[0].replace("Version:", "").split())


def check_size(size, library):
    """Raise if a launcher started several processes and each of them is an MPI world of its own.

    This happens if mpirun belongs to another MPI library than the one that mpi4py loads.
    """
    launched, launcher = launched_size()
    if size == 1 and launched is not None and launched > 1:
        raise UnavailableError(
            f"{launcher} started {launched} or more processes, but MPI in this process knows only itself: mpi4py loads "
            f"{library}, and the launcher belongs to another MPI. {REMEDIES}"
        )


def trial_environment():
    """Variables that let mpirun start a few processes as root and on few cores, for a trial on one host.

    By default Open MPI refuses both, and binds two ranks to the first two cores, also those of another job that runs
    at the same time. MPICH ignores these variables.
    """
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
