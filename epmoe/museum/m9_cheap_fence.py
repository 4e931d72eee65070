"""A release that was made cheap.

Several waves of threads write rows into a ring buffer of the peer, meet at a barrier, and one of them publishes the new
tail. The store of the tail was called a release, but by default it was a wait for the wave's own stores and then a
relaxed store. That covers one wave, and nothing covers the others' rows. In 7 of 8 short runs between 1 and 6 of 8192 rows
were corrupt, silently, and the training loss drifted. The real release is the default again, and costs 2 to 3 % of a step.
"""

from epmoe.device import (
    fence_acq_rel_cta,
    kernel,
    lane_id,
    ld_acquire_sys_i32,
    load_i32,
    load_u64,
    st_relaxed_sys_i32,
    store_i32,
    syncthreads,
    thread_idx,
    u64,
    warp_id,
)

BLOCKS, WARPS = 1, 3
LINKS = ("https://github.com/AMD-AGI/Primus-Turbo/pull/482",)
ROW, TAIL, RESULT = 0, 64, 128
REGIONS = (  # name, place, words
    ("row", ROW, WARPS),
    ("tail", TAIL, 1),
    ("result", RESULT, WARPS),
)
EXPECTED = {1: [20, 21, 22]}
WHY = "The fence before this relaxed store covers one block, and the reader is another GPU: the tail needs a release."
REPAIR = (
    ("st_relaxed_sys_i32(peer + u64(TAIL), WARPS)", "st_release_sys_i32(peer + u64(TAIL), WARPS)"),
)
ALSO = {
    "        syncthreads()\n        if thread_idx() == 0:\n            fence_acq_rel_cta()\n": "A fence of scope sys "
    "between barrier and tail would do as well."
}


@kernel
def publish_the_tail(params, call, my_rank):
    """Each warp of rank 0 writes a row, and warp 0 publishes them all."""
    own = load_u64(params + u64(8 * my_rank))
    peer = load_u64(params + u64(8 * (1 - my_rank)))
    if my_rank == 0:
        if lane_id() == 0:
            store_i32(peer + u64(ROW + 4 * warp_id()), 20 + warp_id())
        syncthreads()
        if thread_idx() == 0:
            fence_acq_rel_cta()
            st_relaxed_sys_i32(peer + u64(TAIL), WARPS)
    elif thread_idx() == 0:
        while ld_acquire_sys_i32(own + u64(TAIL)) < WARPS:
            pass
        for i in range(WARPS):
            row = load_i32(own + u64(ROW + 4 * i))
            store_i32(own + u64(RESULT + 4 * i), row)
