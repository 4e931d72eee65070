"""Memory that every rank has with the same layout, and that its peers write."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SymmetricMemory:
    """One allocation a rank.

    buffers: {rank: Buffer} of the ranks of this process. addresses: for every rank the address at which this process
    reaches that rank's allocation; 0 where it cannot (another p2p world).
    """

    buffers: dict
    addresses: list

    def free(self, together, timeout, heaps=None):
        """Give the ranks' own buffers back. together: all ranks do so now, and none runs a kernel any more.

        heaps: {rank: Heap} of ranks whose buffer results lie in: it stays until nobody holds any of them.
        """
        free_unused(self.buffers, heaps)


def free_unused(buffers, heaps):
    """Free each rank's buffer, {rank: Buffer}, when nobody holds a result that its Heap, {rank: Heap}, has lent."""
    for rank, buffer in buffers.items():
        if heaps and rank in heaps:
            heaps[rank].when_unused(buffer.free)
        else:
            buffer.free()
