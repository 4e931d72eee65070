"""Prefetches: memory is requested early, so that it is in the L2 cache, or in registers, when it is needed.

With cold caches the first access to a sector takes most of a microsecond. A kernel that reads its ids, counters and rows
one after another pays this for each. No thread waits for a prefetch, and a load is waited for only when its value is
used.
"""

from epmoe.device import block_dim, block_idx, device_fn, i32, load16_nc, prefetch, store16, thread_idx, u32, u64

from .division import divided
from .formats.row_copy import LANES, most_parts

SECTOR = 32     # bytes that memory gives at a time
HELD = 4        # vectors of a piece that a lane holds
ROWS_AHEAD = 32 # rows to prefetch before their number is known


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


def context(block):
    """Device function (params): a block asks for its context."""
    p_context, ask = block.index("context"), span(8 * block.context_words)

    @device_fn
    def fetch(params):
        ask(params[p_context])

    return fetch


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


@device_fn
def nothing():
    """The result of `ask` without a piece."""
    none = (u32(0), u32(0), u32(0), u32(0))
    return none, none, none, none


def piece(n_bytes):
    """(ask, put): copy_part of row_copy.py with read_only, in two halves, between which other things can be done.

    ask(src, part, n_parts, lane) -> the first HELD vectors of a lane, on their way; put(dst, src, part, n_parts, lane,
    held) stores them and copies the rest.
    """
    n_vectors, n_runs, step = n_bytes // 16, most_parts(n_bytes), HELD * LANES

    @device_fn
    def bounds(part, n_parts):
        """The first vector of a part, and the end of it."""
        runs = divided(i32(n_runs + n_parts - 1), n_parts)
        first = i32(part * runs * LANES)
        return first, i32(min(first + runs * LANES, n_vectors))

    @device_fn
    def load(src, i, end):
        """Vector i and the next three at distances of 32, on their way."""
        # Past the end the last vector is read again and not stored: no branch comes between the loads.
        last = i32(end - 1)
        return (load16_nc(src + u64(16) * u64(min(i, last))), load16_nc(src + u64(16) * u64(min(i + LANES, last))),
                load16_nc(src + u64(16) * u64(min(i + 2 * LANES, last))),
                load16_nc(src + u64(16) * u64(min(i + 3 * LANES, last))))

    @device_fn
    def store_one(dst, i, end, q):
        """Stores one vector below the end."""
        if i < end:
            store16(dst + u64(16) * u64(i), q[0], q[1], q[2], q[3])

    @device_fn
    def store(dst, i, end, held):
        """Stores the values of `load`."""
        store_one(dst, i, end, held[0])
        store_one(dst, i32(i + LANES), end, held[1])
        store_one(dst, i32(i + 2 * LANES), end, held[2])
        store_one(dst, i32(i + 3 * LANES), end, held[3])

    @device_fn
    def ask(src, part, n_parts, lane):
        first, end = bounds(part, n_parts)
        return load(src, i32(first + lane), end)

    @device_fn
    def put(dst, src, part, n_parts, lane, held):
        first, end = bounds(part, n_parts)
        if first < end:
            store(dst, i32(first + lane), end, held)
            first = i32(first + step)
        while first < end:
            store(dst, i32(first + lane), end, load(src, i32(first + lane), end))
            first = i32(first + step)

    return ask, put
