"""Flags of rows: for each part of a row that peers write, the last call in which it was written.

They are at the beginning of a rank's pool, PARTS u32 for each row. A warp that has written a part of a row raises its
flag there, so a reader need not wait for later rows. Epochs only grow: flags are never lowered.
"""

from epmoe.device import (any_lane, device_fn, i32, ld_acquire_sys_u32, shfl_xor, st_release_sys_u32,
                          syncwarp, u32, u64)

from ..params import in_context
from . import control, peers, waits
from .row_copy import BATCH
from .status import FOR_ARRIVAL

PARTS = control.MOST_PARTS
UNITS = 4096            # parts of rows that a rank's warps have use for
FLAG_BYTES = 4


def bytes_for(n_rows):
    """Bytes of the flags of n rows."""
    return PARTS * FLAG_BYTES * n_rows


@device_fn
def largest(n):
    """The largest n of all lanes of a warp."""
    n = i32(max(n, i32(shfl_xor(n, 16))))
    n = i32(max(n, i32(shfl_xor(n, 8))))
    n = i32(max(n, i32(shfl_xor(n, 4))))
    n = i32(max(n, i32(shfl_xor(n, 2))))
    return i32(max(n, i32(shfl_xor(n, 1))))


def make(shape, block, phase, n_vectors, fewest_parts):
    """Device functions (count_parts, raise_flags, raise_row, is_up, await_flag) for one kernel.

    Its rows have so many 16-byte vectors, and at least so many parts if they are long, so that parts come in turn even
    when all warps have many rows.

    count_parts(notes) -> parts of a row, the same on all ranks. raise_flags(params, mask, row, part, epoch, lane): a
    warp, when it has written the part at the ranks of `mask`; lane r has the row there. raise_row(params, rank, row,
    n_parts, epoch, lane): a warp, when it has written all parts of a row at one rank. is_up(params, my_rank, row, part,
    epoch): whether the part of a lane's row came. await_flag(params, my_rank, row, part, epoch, source): each lane
    waits for the part of its own row that a src_rank writes here, those with row < 0 for none; whether all came.
    """
    ranks = shape.n_ranks
    most = min(PARTS, max(1, -(-n_vectors // BATCH)))
    fewest = min(fewest_parts, most)
    _, arriving, _, _, _ = peers.sums(ranks)
    pool_of, p_words, p_timeout = in_context(block, "pool_ptrs"), block.index("words"), block.index("timeout_ns")

    @device_fn
    def flag_at(params, rank, row, part):
        return u64(pool_of(params, rank)
                   + u64(FLAG_BYTES) * (u64(row) * u64(PARTS) + u64(part)))

    @device_fn
    def count_parts(notes):
        rows = largest(i32(arriving(notes, i32(0))))
        return i32(max(fewest, min(most, i32(u32(UNITS) // u32(max(rows, 1))))))

    @device_fn
    def raise_flags(params, mask, row, part, epoch, lane):
        syncwarp()                              # all lanes' stores of the part, before a lane releases it
        if u32(mask >> u32(lane)) & u32(1) != u32(0):
            st_release_sys_u32(flag_at(params, lane, row, part), u32(epoch))

    @device_fn
    def raise_row(params, rank, row, n_parts, epoch, lane):
        syncwarp()                              # all lanes' stores of the row, before lanes release them
        if lane < n_parts:
            st_release_sys_u32(flag_at(params, rank, row, lane), u32(epoch))

    @device_fn
    def is_up(params, my_rank, row, part, epoch):
        return u32(ld_acquire_sys_u32(flag_at(params, my_rank, row, part))) == u32(epoch)

    @device_fn
    def await_flag(params, my_rank, row, part, epoch, source):
        ok = True
        if row >= 0:
            ok = waits.wait_for_flag(flag_at(params, my_rank, row, part), u32(epoch),
                                     params[p_words] + u64(control.STATUS),
                                     params[p_timeout], phase, FOR_ARRIVAL, source)
        failed = any_lane(not ok)
        syncwarp()                              # what one lane acquired, all lanes read
        return failed == 0

    return count_parts, raise_flags, raise_row, is_up, await_flag
