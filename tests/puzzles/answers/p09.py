"""Puzzle 9, answered."""

EXPLANATION = """
Every (token, k) has a place of its own, so rows need no slots and no counters.
src_info travelled with the token for this moment. The signal is one for a
block: syncthreads gathers what all its threads have written, and the release
of thread 0 passes it on. A segment without rows signals 0, as in dispatch.
"""

RIGHT = [
    """
    row = first + thread_idx()
    while row < end:
        token = load_i32(src_info + u64(8 * row))
        k = load_i32(src_info + u64(8 * row + 4))
        if token >= 0:
            place = returned + u64(4 * (token * TOP_K + k))
            store_i32(place, load_i32(rows + u64(4 * row)))
        row += block_dim()
    syncthreads()
    if thread_idx() == 0:
        st_release_sys_u64(word, u64(end - first))
    """
]

ALSO_RIGHT = [
    [
        """
    if thread_idx() == 0:
        for row in range(first, end):
            token, k = load_i32(src_info + u64(8 * row)), load_i32(src_info + u64(8 * row + 4))
            if token != -1:
                store_i32(returned + u64(4 * (token * TOP_K + k)), load_i32(rows + u64(4 * row)))
        fence_acq_rel_sys()
        st_relaxed_sys_u64(word, u64(end - first))
    """
    ]
]

SIGNAL = "st_release_sys_u64(word, u64(end - first))"

WRONG = [
    ([(f"if thread_idx() == 0:\n    {SIGNAL}", SIGNAL)], "32 stores signal the same word"),
    ([("\nsyncthreads()", "\npass")], "a syncthreads() is missing before the signal"),
    ([("st_release_sys", "st_relaxed_sys")], "the signal is relaxed"),
    ([("st_release_sys", "st_release_gpu")], "its scope is sys"),
    ([("st_release_sys_u64", "store_u64")], "the signal is a plain store"),
    ([(SIGNAL, "pass")], "no signal is sent"),
    ([(SIGNAL, f"if end > first: {SIGNAL}")], "a signal for 0 rows is missing"),
    ([("token * TOP_K + k", "k * TOKENS + token")], "the axes are the wrong way round"),
    ([("token * TOP_K + k", "token")], "k is missing from the place"),
    ([("if token >= 0:", "if True:")], "a padding row, whose token is -1, is sent"),
    ([("row += block_dim()", "break")], "each thread sends one row only"),
    ([("u64(end - first)", "u64(end)")], "end - first"),
    (
        [
            ("row = first + thread_idx()", f"if thread_idx() == 0: {SIGNAL}\nrow = first + thread_idx()"),
            (f"    {SIGNAL}\n", "    pass\n"),
        ],
        "write first, signal after|one thread signals while others",
    ),
    ([("load_i32(rows + u64(4 * row))", "row")], "the wrong row"),
    ([("row = first + thread_idx()", "row = thread_idx()")], "two rows go to the same place"),
    ([("u64(8 * row)", "u64(4 * row)"), ("u64(8 * row + 4)", "u64(4 * row + 4)")], "two rows go to the same place"),
]
