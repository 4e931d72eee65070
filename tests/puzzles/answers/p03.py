"""Puzzle 3, answered."""

EXPLANATION = """
syncwarp makes the stores of all lanes happen before what lane 0 does next. The
release makes everything that happened before visible to whoever acquires the
sum. So one addition speaks for 32 lanes. Any other order has a gap: a relaxed
addition orders nothing, and without syncwarp lane 0 speaks for itself alone.
"""

RIGHT = [
    """
    store_i32(place, value)
    syncwarp()
    if lane_id() == 0:
        red_add_release_gpu_i32(finished, 1)
    """
]

ALSO_RIGHT = [
    [
        """
    store_i32(place, value)
    syncwarp()
    if lane_id() == 31:
        fence_acq_rel_gpu()
        red_add_relaxed_gpu_i32(finished, 1)
    """
    ]
]

WRONG = [
    ([("    red_add_release_gpu_i32(finished, 1)", "    pass")], "written and not counted"),
    ([("syncwarp()", "pass")], "a syncwarp() is missing between the store and the count"),
    ([("red_add_release", "red_add_relaxed")], "a relaxed addition orders nothing"),
    ([("if lane_id() == 0:", "if True:")], "every lane counts"),
    ([("_gpu_", "_cta_")], "cta is too narrow"),
    ([("red_add_release_gpu_i32(finished, 1)", "store_i32(finished, load_i32(finished) + 1)")], "add with a red_add_"),
    (
        [
            ("store_i32(place, value)", "pass"),
            ("red_add_release_gpu_i32(finished, 1)", "red_add_release_gpu_i32(finished, 1)\nstore_i32(place, value)"),
        ],
        "store first, count after",
    ),
    (
        [
            ("store_i32(place, value)", "if lane_id() == 0: red_add_release_gpu_i32(finished, 1)"),
            ("if lane_id() == 0:\n    red_add_release_gpu_i32(finished, 1)", "store_i32(place, value)"),
        ],
        "store first, count after",
    ),
    ([("store_i32(place, value)", "pass")], "counted, and never written"),
    ([("store_i32(place, value)", "if lane_id() == 0: store_i32(place, value)")], "each lane stores its own"),
    ([("(finished, 1)", "(finished, 2)")], "must grow by 1 for each"),
    ([("(place, value)", "(place + lane_id(), value)")], "in `messages` at an address that is no multiple of 4"),
    ([("syncwarp()\nif lane_id() == 0:", "if lane_id() == 0:\n    syncwarp()")], "syncwarp() stands behind the store"),
]
