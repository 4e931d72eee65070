"""Puzzle 11, answered."""

EXPLANATION = """
Whoever counts itself last knows that all have come, without waiting. The atomic
has to do two things: release what this block has done, for whichever block is
last; and acquire what the others have done, should it be this one. syncthreads
before it gathers the threads of the block. What follows needs no order: the end
of the launch comes before the next launch of the stream.
"""

RIGHT = [
    """
    syncthreads()
    if thread_idx() == 0:
        if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:
            for expert in range(EXPERTS):
                store_i32(claimed + u64(4 * expert), 0)
            store_i32(done, 0)
    """
]

ALSO_RIGHT = [
    [
        """
    syncthreads()
    if thread_idx() == 0:
        fence_acq_rel_gpu()
        last = atomic_add_relaxed_gpu_i32(done, 1) == grid_dim() - 1
        fence_acq_rel_gpu()
        if last:
            for expert in range(EXPERTS):
                store_i32(claimed + u64(4 * expert), 0)
            store_i32(done, 0)
    """
    ]
]

WRONG = [
    ([("acq_rel", "relaxed")], "counted by a relaxed atomic"),
    ([("acq_rel", "acquire")], "with acquire alone"),
    ([("acq_rel", "release")], "with release alone"),
    ([("acq_rel_gpu", "acq_rel_cta")], "cta is too narrow"),
    ([("syncthreads()", "pass")], "a syncthreads() is missing before the count"),
    ([("    store_i32(done, 0)", "    pass")], "`done` is not reset to 0"),
    ([("== grid_dim() - 1", "== grid_dim()")], "how many blocks came BEFORE"),
    ([("== grid_dim() - 1", ">= 0")], "`done` is reset while|the last one alone|only the last block"),
    ([("== grid_dim() - 1", "== 0")], "only the last block|the last one alone"),
    ([("range(EXPERTS)", "range(1)")], "only some counters are reset"),
    ([("if thread_idx() == 0:", "if True:")], "every thread counts itself"),
    ([("        store_i32(claimed + u64(4 * expert), 0)", "        pass")], "the counters are not reset"),
    (
        [
            (
                "if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:",
                "atomic_add_acq_rel_gpu_i32(done, 1)\n    if block_idx() == 0:\n        while ld_acquire_gpu_i32(done) < grid_dim():\n            pass",
            )
        ],
        "no block waits, the last one resets",
    ),
]
