"""Memory asked for ahead of need, so that what follows finds it in the L2 cache.

With cold caches the first look at a sector costs most of a microsecond, and a kernel that comes upon its parameters,
ids, counters and rows one after another pays it for each. A prefetch is waited for by nobody.
"""

from epmoe.device import block_dim, device_fn, i32, prefetch, thread_idx, u64

SECTOR = 32     # bytes that memory gives at a time


def span(n_bytes):
    """Device function (address): a block asks for n_bytes; address is a multiple of 16."""
    n_sectors = -(-n_bytes // SECTOR)

    @device_fn
    def fetch(address):
        i = i32(thread_idx())
        while i < n_sectors:
            prefetch(address + u64(SECTOR) * u64(i))
            i = i32(i + block_dim())

    return fetch


def parameters(block):
    """Device function (params): a block asks for its parameters, those of user functions not among them."""
    return span(8 * block.n_words)
