"""Puzzle 7, answered."""

EXPLANATION = """
Two levels. Lanes of a warp exchange numbers without memory; warps meet in
shared memory. The inclusive sum of the last lane is the sum of the warp. After
the barrier each thread adds the sums of the warps before its own: at most 31
additions, and all read the same places, which costs little. An inclusive sum
less the thread's own count is the exclusive one.
"""

RIGHT = [
    """
    inclusive = warp_inclusive_sum_i32(count)
    sums = shared_array(32, int32)
    if lane_id() == 31:
        sums[warp_id()] = inclusive
    syncthreads()
    for w in range(warp_id()):
        start += sums[w]
    start += inclusive - count
    """
]

ALSO_RIGHT = [
    [
        """
    all_counts = shared_array(128, int32)
    all_counts[i] = count
    syncthreads()
    for j in range(i):
        start += all_counts[j]
    """
    ]
]

WRONG = [
    ([("start += inclusive - count", "start += inclusive")], "the thread's own count is in the sum"),
    ([("    start += sums[w]", "    pass")], "each warp begins at 0 again"),
    ([("syncthreads()", "pass")], "have not left yet: a syncthreads() is missing"),
    ([("\nsyncthreads()", "\n    syncthreads()")], "behind the `if`, not in it"),
    ([("if lane_id() == 31:", "if True:")], "several lanes write to the same place"),
    ([("lane_id() == 31", "lane_id() == 0")], "the sum of the warp is in the last lane"),
    ([("range(warp_id())", "range(warp_id() + 1)")], "the sum of the thread's own warp is added too"),
    ([("range(warp_id())", "range(n_warps())")], "the sums of all warps are added"),
    ([("range(warp_id())", "range(1, warp_id())")], "the sum of warp 0 is missing"),
    ([("start += sums[w]", "start = sums[w]")], "only the warp just before is added"),
    ([("start += inclusive - count", "pass"), ("start += sums[w]", "pass")], "`start` is 0"),
]
