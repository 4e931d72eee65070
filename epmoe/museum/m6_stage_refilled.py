"""A stage in shared memory that is refilled while it is read.

Combine reads rows through stages of shared memory: a TMA copy fills a stage, the lanes of a warp add it up, and the
next copy fills it again. With large batches results were wrong on NVL72, and on B200 one row in 1.5 to 3.3 % of calls
(#700), by plausible amounts. The lanes' reads were not fenced from the next copy, which belongs to another proxy, so it
could overwrite numbers that were still being read: #642 lets every lane call fence.proxy.async first, and NCCL's EP kernels
had the same gap. What we have read of #700 does not name its cause. In DeepEP an mbarrier ordered the reads and only the
fence was missing; our race detector is content with ordered reads, so in this miniature the order is missing as well.
"""

from epmoe.device import (
    bulk_load,
    dynamic_shared,
    fence_proxy_async,
    kernel,
    lane_id,
    load_u64,
    mbar_expect_tx,
    mbar_init,
    mbar_try_wait,
    shared_load_i32,
    store_i32,
    syncwarp,
    u32,
    u64,
)

BLOCKS, WARPS, SHARED = 1, 1, 256
LINKS = (
    "https://github.com/deepseek-ai/DeepEP/pull/642",
    "https://github.com/deepseek-ai/DeepEP/issues/700",
    "https://github.com/NVIDIA/nccl-extensions/issues/8",
)
ROUNDS = 2
ROW, RESULT = 0, 64
REGIONS = (("row", ROW, 8 * ROUNDS), ("result", RESULT, 8 * ROUNDS))
EXPECTED = {0: list(range(8 * ROUNDS)), 1: list(range(8 * ROUNDS))}
WHY = "A line is missing after it: lane 0 refills the stage while other lanes may still read it."
REPAIR = (
    (
        "        store_i32(own + u64(RESULT + 32 * n + 4 * lane), value)\n",
        "        store_i32(own + u64(RESULT + 32 * n + 4 * lane), value)\n"
        "        fence_proxy_async()\n        syncwarp()\n",
    ),
)
ALSO = {
    "    for n in range(ROUNDS):\n        if lane == 0:\n": "The lanes must meet before the stage is filled again.",
    "        value = shared_load_i32(stage + u32(4 * lane))\n": "The lanes must meet after it.",
    "            bulk_load(stage, own + u64(ROW + 32 * n), u32(32), full)\n": "Other lanes may still read the stage.",
}


def before(memory, np):
    """What the host writes first."""
    memory.write(np.arange(8 * ROUNDS, dtype=np.int32), ROW)


@kernel
def add_up_by_stages(params, call, my_rank):
    """Lane 0 loads a row into the one stage, 8 lanes read it, and so on."""
    own = load_u64(params + u64(8 * my_rank))
    lane, stage = lane_id(), dynamic_shared()
    full = stage + u32(128)
    if lane == 0:
        mbar_init(full, u32(1))
        fence_proxy_async()
    syncwarp()
    if lane >= 8:
        return
    for n in range(ROUNDS):
        if lane == 0:
            mbar_expect_tx(full, u32(32))
            bulk_load(stage, own + u64(ROW + 32 * n), u32(32), full)
        while mbar_try_wait(full, u32(n & 1)) == 0:
            pass
        value = shared_load_i32(stage + u32(4 * lane))
        store_i32(own + u64(RESULT + 32 * n + 4 * lane), value)
