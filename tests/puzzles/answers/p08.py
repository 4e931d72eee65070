"""Puzzle 8, answered."""

EXPLANATION = """
Segments are numbered in the order of the rows, so the row at which one begins
is the sum of all counts before it: the prefix sum of puzzle 7, done the slow
way. Each block computes it for itself, so blocks need not wait for each other.
The sum at src_rank 0 is where the expert begins. A result such as row_offsets
has one writer, or it would be a race even if all wrote the same number.
"""

RIGHT = [
    """
    row = 0
    for before in range(segment):
        row += load_i32(counts + u64(4 * before))
    if src_rank == 0 and thread_idx() == 0:
        store_i32(row_offsets + u64(4 * local_expert), row)
    slot = thread_idx()
    while slot < count:
        message = load_i32(recv_buf + u64(4 * (segment * SLOTS + slot)))
        store_i32(rows + u64(4 * (row + slot)), message)
        slot += block_dim()
    """
]

ALSO_RIGHT = [
    [
        """
    if thread_idx() == 0:
        row = sum(load_i32(counts + u64(4 * before)) for before in range(segment))
        if src_rank == 0:
            store_i32(row_offsets + u64(4 * local_expert), row)
        for slot in range(count):
            store_i32(rows + u64(4 * (row + slot)), load_i32(recv_buf + u64(4 * (segment * SLOTS + slot))))
    """
    ]
]

WRONG = [
    ([("    row += load_i32(counts + u64(4 * before))", "    row += SLOTS")], "the rows have the gaps of recv_buf"),
    ([("range(segment)", "range(local_expert * N_RANKS, segment)")], "each expert begins at row 0"),
    ([("range(segment)", "range(local_expert * N_RANKS)")], "segments overlap"),
    ([("range(segment)", "range(segment + 1)")], "the segment's own count is in the sum"),
    (
        [
            (
                "for before in range(segment):",
                "for before in [e * N_RANKS + s for s in range(N_RANKS) for e in range(LOCAL) if (s, e) < (src_rank, local_expert)]:",
            )
        ],
        "in the order of src_rank first",
    ),
    ([("    store_i32(row_offsets + u64(4 * local_expert), row)", "    pass")], "row_offsets are not written"),
    ([("slot < count", "slot < SLOTS")], "slots beyond the count are copied"),
    ([("slot += block_dim()", "break")], "only one message a thread is copied"),
    ([("slot = thread_idx()", "slot = 0"), ("slot += block_dim()", "slot += 1")], "several threads write the same row"),
    (
        [("if src_rank == 0 and thread_idx() == 0:", "if thread_idx() == 0:")],
        "the segment with src_rank 0 does|the number of rows of all experts before",
    ),
    ([("(segment * SLOTS + slot)", "(segment + slot)")], "rows come from the wrong slots"),
    (
        [("(row_offsets + u64(4 * local_expert), row)", "(row_offsets + u64(4 * local_expert), row + count)")],
        "the number of rows of all experts before",
    ),
    ([("    store_i32(rows", "    max(rows")], "no row is written"),
    ([("(segment * SLOTS + slot)", "(row + slot)")], "rows come from the wrong slots"),
    ([("u64(4 * local_expert)", "u64(4 * segment)"), ("src_rank == 0 and ", "")], "a word for each local expert"),
    ([("u64(4 * before)", "u64(before)")], "in `counts` at an address that is no multiple of 4"),
    ([("u64(4 * (row + slot))", "u64(row + slot)")], "in `rows` at an address that is no multiple of 4"),
]
