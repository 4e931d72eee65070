"""Prefetches: memory is requested early, so that it is in the L2 cache when it is needed. No thread waits for them.

With cold caches the first access to a sector takes most of a microsecond. A kernel that reads its ids, counters and
rows one after another pays this for each.
"""

from epmoe.device import prefetch, u64

from .params import by_threads

SECTOR = 32     # bytes that memory gives at a time
LINE = 128      # bytes that a prefetch brings into the L2 cache

# (n, address): a block asks for n sectors, or lines, from an address on
fetch_sectors = by_threads(lambda i, address: prefetch(address + u64(SECTOR) * u64(i)))
fetch_lines = by_threads(lambda i, address: prefetch(address + u64(LINE) * u64(i)))


def n_sectors(n_bytes: int) -> int:
    """Sectors of n_bytes from a multiple of 16 on."""
    return -(-n_bytes // SECTOR)
