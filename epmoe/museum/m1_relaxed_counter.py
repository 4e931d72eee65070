"""The last signal, found by a relaxed counter.

A rank sends many messages to a peer, and only its last signal needs to be a release. The blocks count themselves, and
the one that finds itself last raises the flag. The count was a relaxed addition, which passes nothing on from block to
block. So the flag released the last block's message, and nobody else's. Results were right almost always, since the other
messages had time to arrive.
"""

from epmoe.device import (
    atomic_add_relaxed_gpu_i32,
    block_idx,
    grid_dim,
    kernel,
    ld_acquire_sys_i32,
    load_i32,
    load_u64,
    st_release_sys_i32,
    store_i32,
    thread_idx,
    u64,
)

BLOCKS, WARPS = 4, 1
MESSAGE, COUNTER, FLAG, RESULT = 0, 64, 80, 128
REGIONS = (
    ("message", MESSAGE, BLOCKS),
    ("counter", COUNTER, 1),
    ("flag", FLAG, 1),
    ("result", RESULT, BLOCKS),
)
EXPECTED = {1: [10, 11, 12, 13]}
WHY = "The addition must release this block's message, and acquire the messages that were counted before."
REPAIR = (("atomic_add_relaxed_gpu_i32(", "atomic_add_acq_rel_gpu_i32("),)


@kernel
def last_one_signals(params, call, my_rank):
    """Each block of rank 0 sends a message; the last one signals rank 1."""
    own = load_u64(params + u64(8 * my_rank))
    peer = load_u64(params + u64(8 * (1 - my_rank)))
    if thread_idx() > 0:
        return
    if my_rank == 0:
        store_i32(peer + u64(MESSAGE + 4 * block_idx()), 10 + block_idx())
        before = atomic_add_relaxed_gpu_i32(own + u64(COUNTER), 1)
        if before == grid_dim() - 1:
            st_release_sys_i32(peer + u64(FLAG), 1)
    elif block_idx() == 0:
        while ld_acquire_sys_i32(own + u64(FLAG)) == 0:
            pass
        for i in range(BLOCKS):
            row = load_i32(own + u64(MESSAGE + 4 * i))
            store_i32(own + u64(RESULT + 4 * i), row)
