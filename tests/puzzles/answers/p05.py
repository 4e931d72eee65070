"""Puzzle 5, answered."""

EXPLANATION = """
Each signal has one thread that polls it. Its acquire load orders the messages
behind the signal, for this thread. syncthreads then hands on what every thread
has acquired to all others of the block, and `counts` with it. The word is put
back by the thread that has seen the count, so no signal can be lost: its sender
writes again in the next round only. NOT_YET is a number that no count has.
"""

RIGHT = [
    """
    if i < SEGMENTS:
        count = ld_acquire_sys_u64(recv_count + u64(8 * i))
        while count == NOT_YET:
            count = ld_acquire_sys_u64(recv_count + u64(8 * i))
        store_i32(counts + u64(4 * i), i32(count))
        store_u64(recv_count + u64(8 * i), u64(NOT_YET))
    syncthreads()
    """
]

ALSO_RIGHT = [
    [
        """
    if i < SEGMENTS:
        count = NOT_YET
        while count == NOT_YET:
            count = ld_relaxed_sys_u64(recv_count + u64(8 * i))
        fence_acq_rel_sys()
        store_i32(counts + u64(4 * i), i32(count))
        st_relaxed_sys_u64(recv_count + u64(8 * i), u64(NOT_YET))
    syncthreads()
    """
    ]
]

WRONG = [
    ([("while count == NOT_YET:", "if count == NOT_YET:")], "it must look again until the word has changed"),
    ([("ld_acquire_sys", "ld_relaxed_sys")], "a relaxed load, which orders nothing"),
    ([("ld_acquire_sys", "ld_acquire_gpu")], "comes from another GPU, so sys"),
    ([("ld_acquire_sys_u64", "load_u64")], "by a plain load while peers write it"),
    ([("\nsyncthreads()", "\npass")], "other threads of the block have just written"),
    ([("store_u64(recv_count + u64(8 * i), u64(NOT_YET))", "pass")], "recv_count is not reset"),
    ([("u64(NOT_YET)", "u64(0)")], "which is a count"),
    ([("store_i32(counts + u64(4 * i), i32(count))", "pass")], "`counts` is never written"),
    ([("while count == NOT_YET:", "while count == NOT_YET or count == 0:")], "a count of 0 is a signal"),
    (
        [
            (
                "count = ld_acquire_sys_u64(recv_count + u64(8 * i))\n    while",
                "store_u64(recv_count + u64(8 * i), u64(NOT_YET)); count = ld_acquire_sys_u64(recv_count + u64(8 * i))\n    while",
            )
        ],
        "reset before it was read|wait for it first",
    ),
    ([("while count == NOT_YET:", "while count == 0:")], "it must look again until the word has changed"),
    ([("\nsyncthreads()", "\n    syncthreads()")], "behind the `if`, not in it"),
    (
        [
            (
                "i32(count))\n    store_u64(recv_count + u64(8 * i), u64(NOT_YET))",
                "i32(load_u64(recv_count + u64(8 * i))))",
            ),
            ("    store_i32(counts", "    store_u64(recv_count + u64(8 * i), u64(NOT_YET))\n    store_i32(counts"),
        ],
        "reset before it was read",
    ),
    ([("if i < SEGMENTS:", "if True:")], "threads from SEGMENTS on have no signal"),
    ([("u64(4 * i)", "u64(8 * i)")], "an address is outside `counts`"),
    (
        [
            (
                "while count == NOT_YET:\n        count = ld_acquire_sys_u64(recv_count + u64(8 * i))\n    store_i32(counts",
                "if count != NOT_YET: store_i32(counts",
            ),
            ("\n    store_u64(recv", "\n    if count != NOT_YET: store_u64(recv"),
        ],
        "each signal is looked at once",
    ),
    ([("u64(8 * i)", "u64(4 * i)")], "in `recv_count` at an address that is no multiple of 8"),
    ([("count == NOT_YET", "count == -1")], "it never equals -1: compare it with NOT_YET"),
]
