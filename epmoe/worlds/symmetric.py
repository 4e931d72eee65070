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

    def free(self, together, timeout):
        """Give the ranks' own buffers back. together: all ranks do so now, and none runs a kernel any more."""
        for buffer in self.buffers.values():
            buffer.free()
