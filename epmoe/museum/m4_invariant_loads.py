"""Rows that peers write, read through the path for invariant memory.

ld.global.nc is a load for memory that nobody writes while the kernel runs. It is fast, because its cache need not be kept
in step with anything. A receive kernel used it for recv_buf, which peers write while the kernel waits for them. The
cache may hold a line from an earlier round, and no acquire removes it. The load then returns an old row, although all
signals are right.
"""

from epmoe.device import (
    kernel,
    ld_acquire_sys_i32,
    load16_nc,
    load_u64,
    st_release_sys_i32,
    store16,
    thread_idx,
    u32,
    u64,
)

BLOCKS, WARPS = 1, 1
ROW, FLAG, RESULT = 0, 64, 128
REGIONS = (("row", ROW, 4), ("flag", FLAG, 1), ("result", RESULT, 4))
EXPECTED = {1: [5, 6, 7, 8]}
WHY = "load16_nc is for memory that nobody writes during the launch, and a peer writes the row."
REPAIR = (("a, b, c, d = load16_nc(", "a, b, c, d = load16("),)


@kernel
def receive_a_row(params, call, my_rank):
    """Rank 0 sends a row of 16 bytes, rank 1 copies it."""
    own = load_u64(params + u64(8 * my_rank))
    peer = load_u64(params + u64(8 * (1 - my_rank)))
    if thread_idx() > 0:
        return
    if my_rank == 0:
        store16(peer + u64(ROW), u32(5), u32(6), u32(7), u32(8))
        st_release_sys_i32(peer + u64(FLAG), 1)
    else:
        while ld_acquire_sys_i32(own + u64(FLAG)) == 0:
            pass
        a, b, c, d = load16_nc(own + u64(ROW))
        store16(own + u64(RESULT), a, b, c, d)
