"""Memory with the same layout on every rank. Peers write it."""

from dataclasses import dataclass
from functools import partial


@dataclass(eq=False)
class SymmetricMemory:
    """One allocation a rank.

    buffers: {rank: Buffer} of the ranks of this process. addresses: this process's address of every rank's allocation,
    or 0 if it cannot access it (another p2p world).
    """

    buffers: dict
    addresses: list

    def free(self, together, timeout, heaps=None, release=None):
        """Free the ranks' buffers. together: all ranks call this now, and none is running a kernel.

        heaps: {rank: MemoryPool} of ranks with results in their buffer. It stays until the last of them is dropped, and
        is then freed by release(buffer), or at once.
        """
        for rank, buffer in self.buffers.items():
            if heaps and rank in heaps:
                heaps[rank].when_unused(partial(release, buffer) if release else buffer.free)
            else:
                buffer.free()
