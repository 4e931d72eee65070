"""Puzzle 13, answered."""

EXPLANATION = """
The inner loop gathers what one rank needs to know, so the row travels once. The
receiver has the mask and can hand the row to each of its experts. With 4 ranks
and 8 experts a token this sends about half as many rows. What it costs: the
receiver must find out itself how many rows each expert gets.
"""

RIGHT = [
    """
    for dst_rank in range(N_RANKS):
        mask = 0
        for k in range(TOP_K):
            expert = load_i32(ids + u64(4 * (token * TOP_K + k)))
            if expert >= 0 and expert // LOCAL == dst_rank:
                mask |= 1 << k
        if mask != 0:
            slot = atomic_add_relaxed_gpu_i32(reserved + u64(4 * dst_rank), 1)
            send_row(params, dst_rank, slot, token, mask, my_rank)
    """
]

ALSO_RIGHT = [
    [
        """
    for k in range(TOP_K):
        expert = load_i32(ids + u64(4 * (token * TOP_K + k)))
        first, mask = expert >= 0, 0
        for j in range(TOP_K):
            other = load_i32(ids + u64(4 * (token * TOP_K + j)))
            if other >= 0 and other // LOCAL == expert // LOCAL:
                first, mask = first and j >= k, mask + (1 << j)
        if first:
            slot = atomic_add_relaxed_gpu_i32(reserved + u64(4 * (expert // LOCAL)), 1)
            send_row(params, expert // LOCAL, slot, token, mask, my_rank)
    """
    ]
]

CLAIM = "slot = atomic_add_relaxed_gpu_i32(reserved + u64(4 * dst_rank), 1)"
SEND = "send_row(params, dst_rank, slot, token, mask, my_rank)"

WRONG = [
    (
        [("mask |= 1 << k", f"{CLAIM}; send_row(params, dst_rank, slot, token, 1 << k, my_rank)")],
        "sent once for each expert",
    ),
    (
        [("mask |= 1 << k", f"mask |= 1 << k; {CLAIM}; {SEND}"), ("if mask != 0:", "if False:")],
        "again with each expert that is found",
    ),
    ([("mask |= 1 << k", "mask |= 1 << k; break")], "the first k alone"),
    ([("mask |= 1 << k", "mask = 1 << k")], "the last k alone"),
    ([("mask |= 1 << k", "mask += k")], "bit k of the mask is 1 << k"),
    ([("mask |= 1 << k", "mask |= 1 << (expert % LOCAL)")], "a bit for each local expert"),
    ([("if mask != 0:", "if True:")], "a rank without any of the token's experts"),
    ([("expert // LOCAL == dst_rank", "expert % N_RANKS == dst_rank")], "not dealt out in turn"),
    (
        [("for dst_rank in range(N_RANKS):\n    mask = 0", "mask = 0\nfor dst_rank in range(N_RANKS):")],
        "it begins at 0 for each rank",
    ),
    ([("u64(4 * dst_rank)", "u64(0)")], "each has its own"),
    (
        [(CLAIM, "slot = load_i32(reserved + u64(4 * dst_rank)); store_i32(reserved + u64(4 * dst_rank), slot + 1)")],
        "claim with an atomic",
    ),
    ([("_gpu_", "_cta_")], "cta is too narrow"),
    ([("dst_rank), 1)", "dst_rank), 1) + 1")], "slot 0 stays empty"),
    ([(CLAIM, "slot = token")], "no slot is claimed"),
    ([("u64(4 * dst_rank)", "u64(dst_rank)")], "in `reserved` at an address that is no multiple of 4"),
]
