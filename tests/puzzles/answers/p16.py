"""Puzzle 16, answered."""

EXPLANATION = """
The way back needs no counters for slots: every (token, k) has its place. What
is left is one chain: rows, syncthreads, release, acquire, syncthreads, sum. It
ends with the same clean-up as dispatch. Once a rank has all signals of combine,
every rank has received its dispatch, so the buffers of dispatch are free for
the next round: that is why dispatch and combine alternate without a barrier.
The block need not meet before it is counted: its threads have read recv_count
before they met behind the wait, and read it no more. In dispatch they do.
"""

RIGHT = [
    """
    while row < end:
        return_row(params, row, src_rank, my_rank)
        row += n_warps()
    syncthreads()
    if thread_idx() == 0:
        st_release_sys_u64(word, u64(end - first))
    """,
    """
    while i < n_experts:
        while ld_acquire_sys_u64(recv_count + u64(8 * i)) == u64(NOT_YET):
            pass
        i += block_dim()
    syncthreads()
    """,
    """
    for k in range(top_k):
        at = token * top_k + k
        if load_i32(ids + u64(4 * at)) >= 0:
            weight = load_f32(weights + u64(4 * at))
            pair = load_u32(returned + u64(4) * u64(at * pairs + i))
            low = fma_rn(weight, bf16_lo(pair), low)
            high = fma_rn(weight, bf16_hi(pair), high)
    """,
    """
    if thread_idx() == 0:
        if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:
            for i in range(n_experts):
                store_u64(recv_count + u64(8 * i), u64(NOT_YET))
            store_i32(done, 0)
    """,
]

TESTS = "[((3, 2), 2), ((0, 4), 3), ((5, 5), 2)]"

ALSO_RIGHT = [
    [
        """
    while row < end:
        return_row(params, row, src_rank, my_rank)
        row += n_warps()
    syncthreads()
    if thread_idx() == 0:
        fence_acq_rel_sys()
        st_relaxed_sys_u64(word, u64(end - first))
        """,
        """
    while i < n_experts:
        word = ld_relaxed_sys_u64(recv_count + u64(8 * i))
        while word == u64(NOT_YET):
            word = ld_relaxed_sys_u64(recv_count + u64(8 * i))
        i += block_dim()
    fence_acq_rel_sys()
    syncthreads()
        """,
        """
    k = 0
    while k < top_k:
        if load_i32(ids + u64(4 * (token * top_k + k))) != -1:
            w = load_f32(weights + u64(4 * (token * top_k + k)))
            both = load_u32(returned + u64(4 * ((token * top_k + k) * pairs + i)))
            low, high = fma_rn(w, bf16_lo(both), low), fma_rn(w, bf16_hi(both), high)
        k += 1
        """,
        RIGHT[3],
    ]
]

WRONG = [
    ([("while i < n_experts:", "while i < local:")], "wait for n_experts signals"),
    ([("row += n_warps()\nsyncthreads()", "row += n_warps()")], "before all warps of the block have sent"),
    ([("st_release_sys", "st_relaxed_sys")], "the signal is relaxed"),
    ([("st_release_sys", "st_release_gpu")], "need scope sys"),
    (
        [("st_release_sys_u64(word", "if end > first: st_release_sys_u64(word")],
        "a segment without rows sends no signal",
    ),
    ([("ld_acquire_sys", "ld_relaxed_sys")], "the signal is seen by a relaxed load"),
    ([("i += block_dim()\nsyncthreads()", "i += block_dim()")], "a syncthreads() is missing behind the wait"),
    ([("acq_rel", "acquire")], "`done` is not counted with acq_rel"),
    ([("    store_i32(done, 0)", "    pass")], "not reset to 0"),
    ([("store_u64(recv_count + u64(8 * i), u64(NOT_YET))", "pass")], "recv_count is not reset"),
    ([("== grid_dim() - 1", ">= 0")], "only the last block may|is reset before all blocks"),
    (
        [("fma_rn(weight, bf16_lo(pair), low)", "add_rn(mul_rn(weight, bf16_lo(pair)), low)")],
        "`epmoe check` finds a difference",
    ),
    ([(">= 0:", "> -2:")], "empty slots take part"),
    ([("at * pairs + i", "at + i")], "a sum is wrong"),
    ([("acq_rel_gpu", "acq_rel_sys")], "superfluous or stronger"),
    (
        [("if thread_idx() == 0:\n    if atomic", "syncthreads()\nif thread_idx() == 0:\n    if atomic")],
        "superfluous or stronger",
    ),
    ([("TESTS = ", "[((3, 2), 1)]")], "your TESTS are too weak"),
    ([("    i += block_dim()\nsyncthreads()", "    break\nsyncthreads()")], "some signals are not waited for"),
]
