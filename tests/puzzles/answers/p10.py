"""Puzzle 10, answered."""

EXPLANATION = """
Float32 addition is not associative, so "the same result to the bit" needs one
order and one number of roundings. fma rounds once a step, and the only rounding
to bf16 is the last. An empty slot is left out, not multiplied by 0: 0 times NaN
is NaN. The thread owns its two columns, so nothing is shared.
"""

RIGHT = [
    """
    for k in range(TOP_K):
        at = token * TOP_K + k
        if load_i32(ids + u64(4 * at)) >= 0:
            weight = load_f32(weights + u64(4 * at))
            word = load_u32(returned + u64(4 * (at * WORDS + i)))
            low = fma_rn(weight, bf16_lo(word), low)
            high = fma_rn(weight, bf16_hi(word), high)
    """
]

ALSO_RIGHT = [
    [
        """
    k = 0
    while k < TOP_K:
        if load_i32(ids + u64(4 * TOP_K * token + 4 * k)) != -1:
            a = load_f32(weights + u64(4 * TOP_K * token + 4 * k))
            b = load_u32(returned + u64(16 * TOP_K * token + 16 * k + 4 * i))
            low, high = fma_rn(bf16_lo(b), a, low), fma_rn(bf16_hi(b), a, high)
        k += 1
    """
    ]
]

WRONG = [
    ([("range(TOP_K)", "range(TOP_K - 1, -1, -1)")], "k ascends"),
    (
        [
            ("fma_rn(weight, bf16_lo(word), low)", "add_rn(mul_rn(weight, bf16_lo(word)), low)"),
            ("fma_rn(weight, bf16_hi(word), high)", "add_rn(mul_rn(weight, bf16_hi(word)), high)"),
        ],
        "fma_rn(a, b, c) rounds once",
    ),
    (
        [
            (
                "high = fma_rn(weight, bf16_hi(word), high)",
                "high = fma_rn(weight, bf16_hi(word), high)\n        both = pack_bf16x2(low, high)\n        low, high = bf16_lo(both), bf16_hi(both)",
            )
        ],
        "each step is rounded to bf16",
    ),
    ([(">= 0", "> -2")], "empty slots take part"),
    ([(">= 0", "> 0")], "expert 0 is left out"),
    ([("high = fma_rn(weight, bf16_hi(word), high)", "pass")], "its halves go to low and high"),
    ([("weight = load_f32(weights + u64(4 * at))", "weight = f32(1.0)")], "without their weights"),
    ([("bf16_lo", "bf16_xx"), ("bf16_hi", "bf16_lo"), ("bf16_xx", "bf16_hi")], "the two halves are swapped"),
    ([(", low)", ", f32(0.0))"), (", high)", ", f32(0.0))")], "the sum begins anew"),
    ([("weights + u64(4 * at)", "weights + u64(4 * TOP_K * token)")], "the weight of k = 0"),
    ([("weights + u64(4 * at)", "weights + u64(4 * k)")], "the weights of token 0"),
    ([("at * WORDS + i", "at + i")], "the wrong numbers are added"),
    (
        [("low = fma_rn(weight, bf16_lo(word), low)", "pass"), ("high = fma_rn(weight, bf16_hi(word), high)", "pass")],
        "nothing is added yet",
    ),
    (
        [
            (
                "    if load_i32(ids + u64(4 * at)) >= 0:",
                "    if load_i32(ids + u64(4 * at)) < 0:\n        break\n    if True:",
            )
        ],
        "the sum ends at an empty slot",
    ),
]
