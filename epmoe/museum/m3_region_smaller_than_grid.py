"""A waiting region that is smaller than the grid.

Blocks that sum rows wait until the first block says that all have arrived. Each of them has a word to look at, so that
they do not all poll the same one. The region has two words for each expert, and the launch takes as many blocks as there
is work for. With many experts the words suffice; with two experts and many tokens the blocks beyond the fourth poll
memory that belongs to somebody else. The fault is in no line of the kernel: nothing ties the grid to the region.
"""

from epmoe.device import (
    block_idx,
    grid_dim,
    kernel,
    ld_acquire_gpu_i32,
    load_u64,
    st_release_gpu_i32,
    store_i32,
    thread_idx,
    u64,
)

EXPERTS, ROWS, WARPS = 2, 6, 1
FLAGS = 2 * EXPERTS
BLOCKS = 1 + ROWS
ROW, RESULT, READY = 0, 64, 112
REGIONS = (  # name, place, words
    ("row", ROW, ROWS),
    ("result", RESULT, ROWS),
    ("ready", READY, FLAGS),
)
BYTES = READY + 4 * FLAGS
EXPECTED = {0: [1] * ROWS, 1: [1] * ROWS}
WHY = "There are more waiting blocks than flags."
REPAIR = (("BLOCKS = 1 + ROWS\n", "BLOCKS = 1 + min(ROWS, FLAGS)\n"),)
ALSO = {"FLAGS = 2 * EXPERTS\n": "There are fewer flags than waiting blocks."}


@kernel
def wait_for_the_first_block(params, call, my_rank):
    """Block 0 raises the others' flags; each writes a row, or more."""
    own = load_u64(params + u64(8 * my_rank))
    if thread_idx() > 0:
        return
    if block_idx() == 0:
        for block in range(1, grid_dim()):
            st_release_gpu_i32(own + u64(READY + 4 * (block - 1)), 1)
        return
    while ld_acquire_gpu_i32(own + u64(READY + 4 * (block_idx() - 1))) == 0:
        pass
    row = block_idx() - 1
    while row < ROWS:
        store_i32(own + u64(RESULT + 4 * row), 1)
        row += grid_dim() - 1
