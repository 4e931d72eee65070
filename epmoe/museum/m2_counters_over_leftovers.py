"""Completion counters in words that another phase leaves behind.

Dispatch writes prefix sums into a region, and has no use for them once it is over. Combine needs a counter that begins
at 0, and took a word of the same region. On paper the two phases never need it at the same time. But nobody puts the
word back to 0 between them, so the count starts at the number of rows that came. It passes the number it is compared with,
or never meets it, and the last signal is never sent.
"""

from epmoe.device import (
    block_idx,
    kernel,
    ld_acquire_gpu_i32,
    load_u64,
    red_add_release_gpu_i32,
    store_i32,
    thread_idx,
    u64,
)

BLOCKS, WARPS = 3, 1
CALLS = 2
PREFIX, DONE, RESULT = 0, 64, 128
REGIONS = (  # name, place, words
    ("prefix sums", PREFIX, 4),
    ("done", DONE, 1),
    ("result", RESULT, 1),
)
EXPECTED = {0: [BLOCKS], 1: [BLOCKS]}
WHY = "Dispatch leaves a number in this word, so the count does not begin at 0."
REPAIR = (("done = own + u64(PREFIX + 4)", "done = own + u64(DONE)"),)
ALSO = {"                total += 2 + expert\n        return\n": "Dispatch could put the word back to 0 before it returns."}


@kernel
def dispatch_then_combine(params, call, my_rank):
    """Call 0 leaves prefix sums of rows; call 1 counts blocks done."""
    own = load_u64(params + u64(8 * my_rank))
    if thread_idx() > 0:
        return
    if call == 0:
        if block_idx() == 0:
            total = 0
            for expert in range(3):
                store_i32(own + u64(PREFIX + 4 * expert), total)
                total += 2 + expert
        return
    done = own + u64(PREFIX + 4)
    red_add_release_gpu_i32(done, 1)
    if block_idx() == 0:
        while ld_acquire_gpu_i32(done) != BLOCKS:
            pass
        store_i32(own + u64(RESULT), BLOCKS)
