"""Puzzle 6, answered."""

EXPLANATION = """
The order goes from thread to thread: every thread of block 0 stores, then
syncthreads, then one thread releases a flag; thread 0 of another block acquires
it, then syncthreads, then all its threads read. Two barriers and one release
with its acquire carry 70 numbers from all threads to all threads. A flag a
block, not one for all: each block can reset its own without asking whether
the others have seen it.
"""

RIGHT = [
    """
    syncthreads()
    block = thread_idx()
    while block < grid_dim():
        st_release_gpu_i32(ready + u64(4 * block), 1)
        block += block_dim()
    """,
    """
    if thread_idx() == 0:
        while ld_acquire_gpu_i32(ready + u64(4 * block_idx())) == 0:
            pass
        store_i32(ready + u64(4 * block_idx()), 0)
    syncthreads()
    """,
]

ALSO_RIGHT = [
    [
        """
    syncthreads()
    if thread_idx() == 0:
        fence_acq_rel_gpu()
        for block in range(grid_dim()):
            st_relaxed_gpu_i32(ready + u64(4 * block), 1)
    """,
        """
    while ld_acquire_gpu_i32(ready + u64(4 * block_idx())) == 0:
        pass
    syncthreads()
    if thread_idx() == 0:
        store_i32(ready + u64(4 * block_idx()), 0)
    """,
    ]
]

WRONG = [
    ([("syncthreads()\nblock", "pass\nblock")], "before all threads of block 0 have stored"),
    ([("0)\nsyncthreads()", "0)")], "the other threads of its block go on without it|it must hear its flag too"),
    ([("st_release", "st_relaxed")], "raised by a relaxed store"),
    ([("ld_acquire", "ld_relaxed")], "seen by a relaxed load"),
    ([("st_release_gpu", "st_release_cta")], "cta is too narrow"),
    ([("st_release_gpu_i32", "store_i32")], "both need a strong word"),
    ([("ld_acquire_gpu_i32", "load_i32")], "both need a strong word"),
    ([("    store_i32(ready + u64(4 * block_idx()), 0)", "    pass")], "the flags stay raised"),
    ([("block = thread_idx()", "block = 0"), ("block += block_dim()", "block += 1")], "a flag is raised again"),
    ([("block += block_dim()", "break")], "the flags of some blocks are never raised"),
    ([("if thread_idx() == 0:", "store_i32(ready + u64(4 * block_idx()), 0)\nif thread_idx() == 0:")], "reset before"),
    ([("block = thread_idx()", "block = thread_idx() + 1")], "the flags of some blocks are never raised"),
    ([("if thread_idx() == 0:", "if True:")], "one thread polls for the block"),
    (
        [("while ld_acquire_gpu_i32(ready + u64(4 * block_idx())) == 0:\n        pass", "pass")],
        "a block does not wait for its flag|it must hear its flag too",
    ),
    ([("    st_release_gpu_i32(ready + u64(4 * block), 1)", "    pass")], "no flag is ever raised"),
    (
        [
            ("while ld_acquire_gpu_i32(ready + u64(4 * block_idx()))", "while ld_acquire_gpu_i32(ready)"),
            ("store_i32(ready + u64(4 * block_idx()), 0)", "store_i32(ready, 0)"),
        ],
        "all blocks wait for one flag",
    ),
    ([("u64(4 * block_idx())", "u64(block_idx())")], "in `ready` at an address that is no multiple of 4"),
]
