"""Puzzle 14, answered."""

EXPLANATION = """
A word is there when it differs from ABSENT, so no word needs an order with any
other, and relaxed is enough: what is read is what is wanted. Four words are
four flags, and all must be looked at. The price: one number cannot be sent and
needs an ESCAPE (for bf16 rows a NaN that nobody uses), and memory must be reset
to ABSENT after each round, in time for the round that uses it again.
"""

RIGHT = [
    """
    a = ESCAPE if a == ABSENT else a
    b = ESCAPE if b == ABSENT else b
    c = ESCAPE if c == ABSENT else c
    d = ESCAPE if d == ABSENT else d
    store16_relaxed_sys(place, a, b, c, d)
    """,
    """
    while a == ABSENT or b == ABSENT or c == ABSENT or d == ABSENT:
        a, b, c, d = load16_relaxed_sys(place)
    store16_relaxed_sys(place, ABSENT, ABSENT, ABSENT, ABSENT)
    """,
]

ALSO_RIGHT = [
    [
        """
    store16_relaxed_sys(place, *[min(x, ESCAPE) for x in (a, b, c, d)])
    """,
        """
    while max(a, b, c, d) == ABSENT:
        a, b, c, d = load16_relaxed_sys(place)
    store16_relaxed_sys(place, ABSENT, ABSENT, ABSENT, ABSENT)
    """,
    ]
]

POLL = "while a == ABSENT or b == ABSENT or c == ABSENT or d == ABSENT:"

WRONG = [
    ([(POLL, "while d == ABSENT:")], "ANY of its four words"),
    ([(POLL, "while a == ABSENT and b == ABSENT and c == ABSENT and d == ABSENT:")], "ANY of its four words"),
    ([(POLL, "if a == ABSENT:")], "take does not wait|ANY of its four words"),
    ([("load16_relaxed_sys", "load16")], "both need strong words"),
    ([("store16_relaxed_sys(place, a", "store16(place, a")], "both need strong words"),
    ([("store16_relaxed_sys(place, ABSENT, ABSENT, ABSENT, ABSENT)", "pass")], "the words are not reset to ABSENT"),
    ([("ABSENT, ABSENT, ABSENT, ABSENT", "0, 0, 0, 0")], "the words are reset to 0"),
    (
        [
            (
                "(place, ABSENT, ABSENT, ABSENT, ABSENT)",
                "(place, ABSENT, ABSENT, ABSENT, ABSENT)\n"
                "a, b, c, d = [ABSENT if word == ESCAPE else word for word in (a, b, c, d)]",
            )
        ],
        "ESCAPE back into ABSENT",
    ),
    ([("a = ESCAPE if a == ABSENT else a\n", "")], "send ESCAPE instead"),
    ([("store16_relaxed_sys(place, a, b, c, d)", "store16_relaxed_sys(place, b, a, c, d)")], "in the wrong order"),
    ([("store16_relaxed_sys(place, a, b, c, d)", "pass")], "put stores nothing"),
    ([("== ABSENT or", "in (ABSENT, 0) or")], "a word of 0 is data"),
    (
        [
            (POLL, "store16_relaxed_sys(place, ABSENT, ABSENT, ABSENT, ABSENT)\n" + POLL),
            (
                "load16_relaxed_sys(place)\nstore16_relaxed_sys(place, ABSENT, ABSENT, ABSENT, ABSENT)",
                "load16_relaxed_sys(place)",
            ),
        ],
        "poll first, reset after|the words are not reset to ABSENT|reset them once",
    ),
]
