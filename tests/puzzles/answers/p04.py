"""Puzzle 4, answered."""

EXPLANATION = """
Block 0 has written no message, and speaks for all blocks that have. It acquires
what they released with `finished`, and its own release passes that on to the
other GPU: release is cumulative. The counter stays on one GPU (scope gpu), the
signal leaves it (scope sys). A count of 0 is news too: the receiver cannot tell
"nothing" from "not yet".
"""

RIGHT = [
    """
    while ld_acquire_gpu_i32(finished + u64(4 * expert)) != count:
        pass
    words = region(params, RECV_COUNT, expert // LOCAL)
    st_release_sys_u64(words + u64(8 * (expert % LOCAL * N_RANKS + my_rank)), u64(count))
    """
]

ALSO_RIGHT = [
    [
        """
    while ld_relaxed_gpu_i32(finished + u64(4 * expert)) < count:
        pass
    fence_acq_rel_sys()
    words = region(params, RECV_COUNT, expert // LOCAL)
    st_relaxed_sys_u64(words + u64(8 * (expert % LOCAL * N_RANKS + my_rank)), u64(count))
    """
    ]
]

SEND = "st_release_sys_u64(words + u64(8 * (expert % LOCAL * N_RANKS + my_rank)), u64(count))"

WRONG = [
    ([(SEND, "pass")], "no signal has been sent"),
    (
        [("while ld_acquire_gpu_i32(finished + u64(4 * expert)) != count:\n    pass", "pass")],
        "before all messages are written",
    ),
    ([("ld_acquire_gpu", "ld_relaxed_gpu")], "does not acquire what was written"),
    ([("ld_acquire_gpu_i32", "load_i32")], "`finished` is read by a plain load"),
    ([("st_release_sys", "st_relaxed_sys")], "the signal is relaxed"),
    ([("st_release_sys", "st_release_gpu")], "it goes to another GPU, so sys"),
    ([("st_release_sys_u64", "store_u64")], "the signal is a plain store"),
    ([("expert // LOCAL", "my_rank")], "the signals lie at home"),
    ([("+ my_rank)", "+ expert // LOCAL)")], "my_rank is the sender"),
    ([(SEND, f"if count > 0: {SEND}")], "an expert without tokens gets no signal"),
    ([("u64(count)", "u64(1)")], "not just a 1"),
    ([("u64(count)", "u64(count + 1)")], "not one more"),
    ([("u64(4 * expert)", "u64(0)")], "the count of this very expert"),
    ([("u64(8 *", "u64(4 *")], "in `recv_count` at an address that is no multiple of 8"),
    ([(SEND, f"if expert // LOCAL == my_rank: {SEND}")], "a signal is missing"),
    ([("(expert % LOCAL * N_RANKS + my_rank)", "(my_rank * LOCAL + expert % LOCAL)")], "at the wrong place"),
    ([("u64(4 * expert)", "u64(expert)")], "in `finished` at an address that is no multiple of 4"),
    ([("RECV_COUNT, expert // LOCAL", "RECV_COUNT, expert")], "there is no rank 2: ranks are 0 to 1"),
]
