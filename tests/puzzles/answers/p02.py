"""Puzzle 2, answered."""

EXPLANATION = """
Reading `reserved` and adding to it are one operation, so no two warps get the
same number. One lane claims for the warp: 32 claims would take 32 slots. Only
lane 0 knows the answer then, and warp_broadcast_i32 tells the others; it is
also where the warp meets, so all 32 lanes must come to it. The atomic is
relaxed: it hands out numbers, and announces nothing. Its scope is gpu, since
warps of several blocks claim.
"""

RIGHT = [
    """
    slot = 0
    if lane_id() == 0:
        slot = atomic_add_relaxed_gpu_i32(reserved, 1)
    slot = warp_broadcast_i32(slot, 0)
    place = messages + u64(4 * (slot * LANES + lane_id()))
    store_i32(place, 100 * (token + 1) + lane_id())
    """
]

ALSO_RIGHT = [
    [
        """
    slot = 0
    if lane_id() == 7:
        slot = atomic_add_acq_rel_sys_i32(reserved, 1)
    slot = shfl_idx(slot, 7)
    store_i32(messages + u64(4 * (slot * LANES + lane_id())), 100 * (token + 1) + lane_id())
    """
    ]
]

WRONG = [
    (
        [("if lane_id() == 0:", "if True:"), ("slot = warp_broadcast_i32(slot, 0)", "pass")],
        "every lane claims a slot of its own",
    ),
    ([("slot = warp_broadcast_i32(slot, 0)", "pass")], "do not agree on the slot|two warps write to the same slot"),
    ([("warp_broadcast_i32(slot, 0)", "warp_broadcast_i32(slot, 1)")], "all tokens go to slot 0"),
    (
        [
            (
                "slot = atomic_add_relaxed_gpu_i32(reserved, 1)",
                "slot = load_i32(reserved); store_i32(reserved, slot + 1)",
            )
        ],
        "read and add in one operation",
    ),
    ([("relaxed_gpu", "relaxed_cta")], "atomic within a block only"),
    ([("(reserved, 1)", "(reserved, 2)")], "claimed twice for each token"),
    ([("(reserved, 1)", "(reserved, 1) + 1")], "the atomic returns the number before it added"),
    ([("slot = warp_broadcast_i32", "    slot = warp_broadcast_i32")], "do not agree on the slot"),
    ([("100 * (token + 1) + lane_id())", "100 * (token + 1))")], "what is written there is not"),
    ([("slot * LANES", "slot")], "two warps write to the same slot|lane i has place i|several tokens|do not agree"),
    ([("store_i32(place", "print(place) if place < 0 else max(place")], "no message is written"),
    ([("slot = 0\nif", "if")], "set it before the `if` too"),
    (
        [
            (
                "store_i32(place, 100 * (token + 1) + lane_id())",
                "if lane_id() == 0:\n    for i in range(LANES):\n        store_i32(place + u64(4 * i), 100 * (token + 1) + i)",
            )
        ],
        "31 of 32 threads have no part in the work",
    ),
    ([("slot * LANES", "token * LANES")], "the slot of its token's number"),
    ([("(4 * (slot * LANES + lane_id()))", "(slot * LANES + lane_id())")], "an address that is no multiple of 4"),
    ([("slot * LANES + lane_id()", "slot * LANES")], "two lanes write to one place"),
]
