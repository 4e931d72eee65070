"""The words for ranks of other p2p worlds, imported only by kernels that need them: one host needs no NVSHMEM.

shmem_put_nbi_warp(dst, src, nbytes, pe): the lanes of a warp start to copy nbytes to rank pe.
shmem_signal_set(word, value, pe): set a uint64 word of rank pe.
shmem_fence(): what this thread sent to a rank arrives before what it sends there later; and a fence at system scope.
shmem_quiet(): what this thread sent, its part of its warp's puts included, has arrived; the sources may be reused.

dst and word are addresses in the caller's own symmetric memory and name the same place in that of rank pe; src is
symmetric, too. Nothing is ordered otherwise. Source: NVSHMEM's put, signal, fence and quiet.
"""

from . import SIM

if SIM:
    from .sim.network import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set
else:
    from .shmem_gpu import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set

__all__ = ["shmem_fence", "shmem_put_nbi_warp", "shmem_quiet", "shmem_signal_set"]
