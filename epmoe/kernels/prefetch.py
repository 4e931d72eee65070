"""Prefetches: memory is requested early, so that it is in the L2 cache, or in registers, when it is needed.

With cold caches the first access to a sector takes most of a microsecond. A kernel that reads its ids, counters and rows
one after another pays this for each. No thread waits for a prefetch, and a load is waited for only when its value is
used.
"""

from epmoe.device import block_dim, block_idx, device_fn, i32, prefetch, thread_idx, u64

from .params import by_threads

SECTOR = 32     # bytes that memory gives at a time
LINE = 128      # bytes that a prefetch brings into the L2 cache
ROWS_AHEAD = 32 # rows to prefetch before their number is known


def span(n_bytes):
    """Device function (address): a block asks for n_bytes; address is a multiple of 16."""
    n_sectors = -(-n_bytes // SECTOR)
    fetch = by_threads(lambda i, address: prefetch(address + u64(SECTOR) * u64(i)))
    return device_fn(lambda address: fetch(n_sectors, address))


def first_rows(bytes_a_row):
    """Device function (rows, src_infos, n_rows): the blocks ask for src_info, and for the first few of the n_rows rows.

    n_rows: how many rows of bytes_a_row, and how many entries of src_info, there is memory for.
    """
    fetch_row = span(bytes_a_row)

    @device_fn
    def fetch(rows, src_infos, n_rows):
        at = i32(block_idx() * block_dim() + thread_idx())
        if u64(at) < (n_rows * u64(8) + u64(SECTOR - 1)) // u64(SECTOR):
            prefetch(src_infos + u64(SECTOR) * u64(at))
        if block_idx() < ROWS_AHEAD and u64(block_idx()) < n_rows:
            fetch_row(rows + u64(bytes_a_row) * u64(block_idx()))

    return fetch
