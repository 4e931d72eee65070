"""Puzzle 12, answered."""

EXPLANATION = """
A wait can only hang if the block that should end it is stuck as well. So sort
the work: sends wait for nobody, signals wait for sends, receives wait for
signals. If every block does them in this order, there is always somebody who
can go on, as long as all blocks are on the GPU at once. And the end of a launch
was a barrier: the counters could be reset since nobody used them any more.
Without it the last block has to be found, by an atomic that orders.
"""

RIGHT = [
    """
    token, expert, segment = block_idx(), block_idx(), block_idx()
    while token < num_tokens:
        send(params, token, my_rank)
        token += grid_dim()
    while expert < EXPERTS:
        signal(params, expert, num_tokens, my_rank)
        expert += grid_dim()
    while segment < SEGMENTS:
        receive(params, segment, my_rank)
        segment += grid_dim()
    if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:
        clean(params, my_rank)
    """
]

ALSO_RIGHT = [
    [
        """
    for token in range(block_idx(), num_tokens, grid_dim()):
        send(params, token, my_rank)
    for expert in range(grid_dim() - 1 - block_idx(), EXPERTS, grid_dim()):
        signal(params, expert, num_tokens, my_rank)
    last = atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1
    for segment in range(block_idx(), SEGMENTS, grid_dim()):
        receive(params, segment, my_rank)
    if last:
        clean(params, my_rank)
    """
    ]
]

SIGNALS = """while expert < EXPERTS:
    signal(params, expert, num_tokens, my_rank)
    expert += grid_dim()
"""
RECEIVES = """while segment < SEGMENTS:
    receive(params, segment, my_rank)
    segment += grid_dim()
"""
SENDS = """while token < num_tokens:
    send(params, token, my_rank)
    token += grid_dim()
"""

WRONG = [
    (
        [
            ("block_idx(), block_idx(), block_idx()", "(0, 0, 0) if block_idx() == 0 else (99, 99, 99)"),
            ("+= grid_dim()", "+= 1"),
        ],
        "4 of 6 threads have no part in the work",
    ),
    ([(SIGNALS + RECEIVES, RECEIVES + SIGNALS)], "signal first, receive after"),
    ([(SENDS + SIGNALS, SIGNALS + SENDS)], "all its sends come before its signals"),
    (
        [("if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:\n    clean(params, my_rank)", "")],
        "the counters are not reset",
    ),
    (
        [("if atomic_add_acq_rel_gpu_i32(done, 1) == grid_dim() - 1:", "if block_idx() == 0:")],
        "only the last block to end may clean",
    ),
    ([("acq_rel", "relaxed")], "counted by a relaxed atomic"),
    ([("== grid_dim() - 1", "== 0")], "in `done` is the last"),
    ([("    expert += grid_dim()", "    break")], "some signals are never sent"),
    ([("    segment += grid_dim()", "    break")], "some segments are not received"),
    ([("    token += grid_dim()", "    break")], "a token is not sent"),
    ([(SIGNALS, "")], "nobody signals"),
    ([(RECEIVES, "")], "nothing is received"),
    (
        [
            (
                SENDS + SIGNALS,
                "while token < num_tokens:\n    send(params, token, my_rank)\n    token += grid_dim()\n    for expert in range(EXPERTS):\n        signal(params, expert, num_tokens, my_rank)\n",
            )
        ],
        "all its sends come before its signals",
    ),
    (
        [(SIGNALS + RECEIVES, SIGNALS.replace("    expert +=", "    receive(params, expert, my_rank)\n    expert +="))],
        "all its signals come before its receives",
    ),
]
