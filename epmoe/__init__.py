"""Expert-parallel dispatch and combine for Mixture-of-Experts: Numba-CUDA kernels that also run on a CPU.

Names are imported when they are first used: `import epmoe` loads neither Numba nor a GPU driver.
"""

from importlib import import_module

__version__ = "0.2.0"  # the one place: setup.cfg reads it

# name -> the module that defines it
_HOME = {
    "EPConfig": "epmoe_ref.config",
    "EPError": "epmoe_ref.errors",
    "EPValueError": "epmoe_ref.errors",
    "EPStateError": "epmoe_ref.errors",
    "UnavailableError": "epmoe_ref.errors",
    "PeerTimeout": "epmoe_ref.errors",
    "DeadlockError": "epmoe_ref.errors",
    "OutOfBoundsError": "epmoe_ref.errors",
    "RaceError": "epmoe_ref.errors",
    "LocalWorld": "epmoe.worlds.local",
    "MPIWorld": "epmoe.worlds.mpi",
    "ShmemWorld": "epmoe.worlds.shmem",
    "ExpertParallel": "epmoe.expert_parallel",
    "Dispatched": "epmoe.host.dispatched",
    "DeviceArray": "epmoe.host.arrays",
    "EPLocalSyncCounters": "epmoe_ref.counters",
    "LaunchConfig": "epmoe.kernels",
    "dispatch_async_kernel": "epmoe.kernels.plain",
    "dispatch_wait_kernel": "epmoe.kernels.plain",
    "dispatch_kernel": "epmoe.kernels.plain",
    "combine_async_kernel": "epmoe.kernels.plain",
    "combine_wait_kernel": "epmoe.kernels.plain",
    "combine_kernel": "epmoe.kernels.plain",
    "fused_silu_kernel": "epmoe.kernels",
    "mul_rn": "epmoe.host.user_functions",
    "add_rn": "epmoe.host.user_functions",
    "fma_rn": "epmoe.host.user_functions",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'epmoe' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
