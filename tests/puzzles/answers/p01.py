"""Puzzle 1, answered."""

EXPLANATION = """
Two loops with a stride. Blocks deal the rows among themselves, threads the
vectors of a row. Neither needs to know how many rows or threads there are,
so the same kernel serves every launch. No two threads touch the same bytes,
so nothing has to be ordered.
"""

RIGHT = [
    """
    row = block_idx()
    while row < num_tokens:
        i = thread_idx()
        while i < VECTORS:
            at = u64(16 * (row * VECTORS + i))
            a, b, c, d = load16(rows + at)
            store16(copied + at, a, b, c, d)
            i += block_dim()
        row += grid_dim()
    """
]

ALSO_RIGHT = [
    [
        """
    v = block_idx() * block_dim() + thread_idx()
    while v < num_tokens * VECTORS:
        store16(copied + u64(16 * v), *load16(rows + u64(16 * v)))
        v += grid_dim() * block_dim()
    """
    ],
    [RIGHT[0].replace("u64(16 * (row * VECTORS + i))", "16 * (row * VECTORS + i)")],
]

WRONG = [
    ([("row += grid_dim()", "break")], "each block copies one row only"),
    ([("i += block_dim()", "break")], "each thread copies one vector of a row"),
    ([("row += grid_dim()", "break"), ("i += block_dim()", "break")], "each thread copies one vector in all"),
    ([("16 * (row", "(row")], "accesses 16 bytes in `rows` at an address that is no multiple of 16"),
    ([("row = block_idx()", "row = 0"), ("row += grid_dim()", "row += 1")], "several blocks copy the same row"),
    ([("i = thread_idx()", "i = 0"), ("i += block_dim()", "i += 1")], "threads of one block copy the same"),
    ([("row < num_tokens", "row < 12")], "rows from num_tokens on are copied too"),
    ([("row < num_tokens", "row <= num_tokens")], "one row too many is copied"),
    ([("i < VECTORS", "i <= VECTORS")], "one vector too many of each row"),
    ([("a, b, c, d)", "d, c, b, a)")], "words of a vector are in the wrong places"),
    ([("row * VECTORS + i", "row + i")], "the rows overlap"),
    ([("16 * (row * VECTORS", "16 * ((row + 1) * VECTORS")], "block 0 begins with row 0"),
    ([("store16(copied", "store16(rows")], "no row has been copied yet"),
    ([("i += block_dim()", "pass")], "a loop never ends"),
    ([("load16(rows + at)", "rows[row, i]")], "A region is an address, not an array"),
    (
        [("row = block_idx()", "row = 0 if block_idx() == 0 else num_tokens"), ("row += grid_dim()", "row += 1")],
        "2 of 4 threads have no part in the work",
    ),
    ([("load16(rows", "load16(copied"), ("store16(copied", "store16(rows")], "`rows` is overwritten"),
    ([("store16(copied + at", "store16(copied + at + u64(16)")], "everything lies 16 bytes too far"),
]
