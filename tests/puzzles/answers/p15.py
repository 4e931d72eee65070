"""Puzzle 15, answered."""

EXPLANATION = """
Four synchronisations carry a dispatch. A message is counted when its warp has
met (syncwarp, release). The signaller acquires the count and releases the
signal to another GPU. Every block acquires all signals and meets. And the last
block to end, found by an atomic that both acquires and releases, resets the
words, since nobody looks at them any more. Break any one of them and the race
detector reports it; results alone show only lost waits and resets, and those
only in tests with several rounds.
"""

RIGHT = [
    """
    slot = 0
    if lane_id() == 0:
        slot = atomic_add_relaxed_gpu_i32(reserved, 1)
    slot = warp_broadcast_i32(slot, 0)
    write_message(params, expert, slot, token, k, my_rank)
    syncwarp()
    if lane_id() == 0:
        red_add_release_gpu_i32(finished, 1)
    """,
    """
    while ld_acquire_gpu_i32(finished) != count:
        pass
    st_release_sys_u64(words + u64(8 * (expert % local * n_ranks + my_rank)), u64(count))
    """,
    """
    while i < local * n_ranks:
        while ld_acquire_sys_u64(recv_count + u64(8 * i)) == u64(NOT_YET):
            pass
        i += block_dim()
    syncthreads()
    """,
    """
    syncthreads()
    if thread_idx() == 0:
        if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:
            for i in range(n_experts):
                store_i32(reserved + u64(4 * i), 0)
                store_i32(finished + u64(4 * i), 0)
            for i in range(local * n_ranks):
                store_u64(recv_count + u64(8 * i), u64(NOT_YET))
            store_i32(done, 0)
    """,
]

TESTS = "[((3, 2), 2), ((0, 4), 3), ((5, 5), 2)]"

ALSO_RIGHT = [
    [
        """
    slot = 0
    if lane_id() == 0:
        slot = atomic_add_relaxed_gpu_i32(reserved, 1)
    slot = shfl_idx(slot, 0)
    write_message(params, expert, slot, token, k, my_rank)
    syncwarp()
    if lane_id() == 0:
        fence_acq_rel_gpu()
        red_add_relaxed_gpu_i32(finished, 1)
        """,
        """
    while ld_relaxed_gpu_i32(finished) < count:
        pass
    fence_acq_rel_sys()
    st_relaxed_sys_u64(words + u64(8 * (expert % local * n_ranks + my_rank)), u64(count))
        """,
        """
    if i == 0:
        for segment in range(local * n_ranks):
            while ld_acquire_sys_u64(recv_count + u64(8 * segment)) == u64(NOT_YET):
                pass
    syncthreads()
        """,
        """
    syncthreads()
    if thread_idx() == 0:
        last = atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1
        if last:
            for i in range(n_experts):
                store_i32(reserved + u64(4 * i), 0)
                store_i32(finished + u64(4 * i), 0)
            for i in range(local * n_ranks):
                store_u64(recv_count + u64(8 * i), u64(NOT_YET))
            store_i32(done, 0)
        """,
    ]
]

WRONG = [
    ([("slot = warp_broadcast_i32(slot, 0)", "pass")], "only the lane that claims a slot knows it"),
    ([("\nsyncwarp()", "\npass")], "a syncwarp() is missing before the count"),
    ([("red_add_release", "red_add_relaxed")], "counted by a relaxed addition"),
    ([("while ld_acquire_gpu_i32(finished) != count:\n    pass", "pass")], "before all messages are written"),
    ([("ld_acquire_gpu", "ld_relaxed_gpu")], "`finished` is read by a relaxed load"),
    ([("st_release_sys", "st_relaxed_sys")], "the signal is relaxed"),
    ([("st_release_sys", "st_release_gpu")], "need scope sys"),
    (
        [("st_release_sys_u64(words", "if count > 0: st_release_sys_u64(words")],
        "an expert without tokens gets no signal",
    ),
    ([("ld_acquire_sys", "ld_relaxed_sys")], "the signal is seen by a relaxed load"),
    ([("i += block_dim()\nsyncthreads()", "i += block_dim()")], "a syncthreads() is missing behind the wait"),
    ([("            store_i32(finished + u64(4 * i), 0)\n", "")], "0 after each round"),
    ([("acq_rel", "relaxed")], "`done` is not counted with acq_rel"),
    ([("    store_i32(done, 0)", "    pass")], "not reset to 0|is reset"),
    ([("store_u64(recv_count + u64(8 * i), u64(NOT_YET))", "pass")], "recv_count is not reset"),
    ([("red_add_release_gpu", "red_add_release_sys")], "superfluous or stronger"),
    ([("while i < local", "syncthreads()\nwhile i < local")], "superfluous or stronger"),
    ([("TESTS = ", "[((3, 2), 1)]")], "your TESTS are too weak"),
    ([("    i += block_dim()\nsyncthreads()", "    break\nsyncthreads()")], "some signals are not waited for"),
]
