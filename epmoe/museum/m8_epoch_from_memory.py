"""An epoch that every block reads for itself.

Flags that count calls need no clearing: a wait is for the number of this call, the epoch. Each block took the epoch from
a word of device memory, and block 0 wrote the next one there. Nothing held block 0 back until the others had read. A
block that was late read the number of the NEXT call, and waited for a signal that nobody would send. The fix counts on
the host, which hands the same number to all blocks of a launch.
"""

from epmoe.device import (
    block_idx,
    kernel,
    ld_acquire_sys_i32,
    ld_relaxed_gpu_i32,
    load_u64,
    st_relaxed_gpu_i32,
    st_release_sys_i32,
    store_i32,
    thread_idx,
    u64,
)

BLOCKS, WARPS = 3, 1
LINKS = ("https://github.com/microsoft/mscclpp/pull/875",)
EPOCH, FLAG, RESULT = 0, 16, 64
REGIONS = (  # name, place, words
    ("epoch", EPOCH, 1),
    ("flag", FLAG, 1),
    ("result", RESULT, BLOCKS),
)
EXPECTED = {0: [1] * BLOCKS, 1: [1] * BLOCKS}
WHY = "Block 0 changes the word while other blocks may not have read it."
REPAIR = (
    ("    epoch = ld_relaxed_gpu_i32(own + u64(EPOCH)) + 1\n", "    epoch = call + 1\n"),
    ("        st_relaxed_gpu_i32(own + u64(EPOCH), epoch)\n", ""),
)
ALSO = {"        st_relaxed_gpu_i32(own + u64(EPOCH), epoch)\n": WHY}


@kernel
def wait_for_the_epoch(params, call, my_rank):
    """Block 0 tells the peer, all blocks wait for the peer's word."""
    own = load_u64(params + u64(8 * my_rank))
    peer = load_u64(params + u64(8 * (1 - my_rank)))
    if thread_idx() > 0:
        return
    epoch = ld_relaxed_gpu_i32(own + u64(EPOCH)) + 1
    if block_idx() == 0:
        st_relaxed_gpu_i32(own + u64(EPOCH), epoch)
        st_release_sys_i32(peer + u64(FLAG), epoch)
    while ld_acquire_sys_i32(own + u64(FLAG)) < epoch:
        pass
    store_i32(own + u64(RESULT + 4 * block_idx()), 1)
