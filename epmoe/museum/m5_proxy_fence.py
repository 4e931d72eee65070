"""A row that is polled for by a load, and read by a bulk copy.

Low-latency combine waits for a peer's flag with ordinary loads, and then lets the TMA unit copy the row into shared
memory. The TMA unit is another proxy: it has its own way to memory. An acquire orders the loads of threads, not the
copies of another proxy, so the copy may read what was there before. A user saw results that changed from run to run with
large batches on NVL72, and proposed fence.proxy.async between the wait and the copy. The maintainers agreed that the code
does not strictly follow the memory model, relied on what they know of the hardware, and merged another fence (exhibit 6).
"""

from epmoe.device import (
    bulk_load,
    dynamic_shared,
    fence_proxy_async,
    kernel,
    ld_acquire_sys_i32,
    load_u64,
    mbar_expect_tx,
    mbar_init,
    mbar_try_wait,
    shared_load_i32,
    st_release_sys_i32,
    store16,
    store_i32,
    thread_idx,
    u32,
    u64,
)

BLOCKS, WARPS, SHARED = 1, 1, 256
LINKS = (
    "https://github.com/deepseek-ai/DeepEP/issues/621",
    "https://github.com/deepseek-ai/DeepEP/pull/632",
)
ROW, FLAG, RESULT = 0, 64, 128
REGIONS = (("row", ROW, 4), ("flag", FLAG, 1), ("result", RESULT, 4))
EXPECTED = {1: [5, 6, 7, 8]}
WHY = "A line is missing before it: fence_proxy_async() orders what was acquired before the bulk copy."
REPAIR = (
    (
        "        bulk_load(stage, own + u64(ROW), u32(16), arrived)\n",
        "        fence_proxy_async()\n        bulk_load(stage, own + u64(ROW), u32(16), arrived)\n",
    ),
)
ALSO = {
    "        while ld_acquire_sys_i32(own + u64(FLAG)) == 0:\n            pass\n": WHY.replace("before it:", "after the loop:"),
    "        store16(peer + u64(ROW), u32(5), u32(6), u32(7), u32(8))\n"
    "        st_release_sys_i32(peer + u64(FLAG), 1)\n": "A fence_proxy_async() between row and signal would do as well.",
}


@kernel
def copy_by_tma(params, call, my_rank):
    """Rank 0 sends a row; rank 1 writes it down from shared memory."""
    own = load_u64(params + u64(8 * my_rank))
    peer = load_u64(params + u64(8 * (1 - my_rank)))
    if thread_idx() > 0:
        return
    if my_rank == 0:
        store16(peer + u64(ROW), u32(5), u32(6), u32(7), u32(8))
        st_release_sys_i32(peer + u64(FLAG), 1)
    else:
        stage = dynamic_shared()
        arrived = stage + u32(128)
        mbar_init(arrived, u32(1))
        fence_proxy_async()
        mbar_expect_tx(arrived, u32(16))
        while ld_acquire_sys_i32(own + u64(FLAG)) == 0:
            pass
        bulk_load(stage, own + u64(ROW), u32(16), arrived)
        while mbar_try_wait(arrived, u32(0)) == 0:
            pass
        for i in range(4):
            value = shared_load_i32(stage + u32(4 * i))
            store_i32(own + u64(RESULT + 4 * i), value)
