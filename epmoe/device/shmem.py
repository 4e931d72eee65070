"""The intrinsics for ranks of other p2p worlds. Only kernels that use them import this, so one host needs no NVSHMEM.

shmem_put_nbi_warp(dst, src, nbytes, pe): the lanes of a warp start copying nbytes to rank pe.
shmem_signal_set(word, value, pe): set a uint64 word of rank pe.
shmem_fence(): this thread's earlier puts and signals to a rank arrive before its later ones. Also a system-scope fence.
shmem_quiet(): this thread's puts and signals, with its part of its warp's puts, have arrived; sources may be reused.

dst and word are addresses in the caller's own symmetric memory and name the same place in rank pe's. src is symmetric
too. No other order is guaranteed. Source: NVSHMEM's put, signal, fence and quiet.
"""

from . import SIM

if SIM:
    from .sim.network import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set
else:
    from .shmem_gpu import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set

__all__ = ["shmem_fence", "shmem_put_nbi_warp", "shmem_quiet", "shmem_signal_set"]
