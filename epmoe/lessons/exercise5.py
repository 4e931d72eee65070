"""Exercises of lesson 5: rounds of dispatch alone, in a safe order."""

import re

from epmoe.lessons.answers import Wrong, call
from epmoe.lessons.mailbox_model import explore, told
from epmoe.lessons.number_questions import Number

STUB = '''
def program(rounds):
    """The steps of every rank, a list of words such as ["send 0", "wait 0", "barrier"]."""
    steps = []
    for i in range(rounds):
        steps += ["send 0", "wait 0"]
    return steps
'''

WARM_UP = Number(
    132 * 2,
    "264 blocks are on the GPU at once, and each takes more than one piece of work.",
    (
        (300, "36 of them would start only when others end, and those wait for them."),
        (132, "each multiprocessor holds 2 blocks."),
        (150, "the work does not matter: how many blocks are on the GPU at once?"),
        (66, "each multiprocessor holds 2 blocks, not half of one."),
        (36, "this is how many blocks do NOT fit."),
        (600, "the work does not matter: how many blocks are on the GPU at once?"),
    ),
    "all blocks must be on the GPU at once.",
)
STRETCH = Number(
    4,
    "a rank that sends round i + 1 has seen round i - 1 of a peer. The peer sent that before it waited for round i - 2. "
    "So the messages of i - 2, i - 1 and i may be unread, and i + 1 needs a fourth buffer.",
    (
        (3, "a peer that has sent round i - 1 may not have waited for round i - 2 yet: it sends ahead, too."),
        (
            2,
            'that is enough if each round is waited for before the next is sent. Give ["send 0", "send 1", '
            '"wait 0", "send 0", ...] to CORE and read what the judge says.',
        ),
        (1, "the message of the round before may be unread."),
        (5, "that works, but fewer do."),
    ),
    "which rounds can a peer not have read yet when round i + 1 is sent?",
)

STEP = re.compile(r"(send|wait) [01]$|barrier$")
# ranks, rounds; the last ones for what goes wrong late
WORLDS = ((2, 1), (2, 2), (2, 3), (2, 5), (3, 3), *((2, n) for n in (*range(6, 20), 33, 64, 257, 1000)), (3, 7))


def judge(answer):
    """What was right; raises Wrong."""
    for n_ranks, rounds in WORLDS:
        steps = _steps(call(answer, "program", rounds), rounds)
        found = explore(steps, n_ranks)
        if found:
            what, path = found
            way = f" The shortest way there, each line a step that was begun:\n{told(steps, path)}" if path else ""
            raise Wrong(f"with {n_ranks} ranks, program({rounds}): {what}.{way}")
    barriers = _steps(call(answer, "program", 5), 5).count("barrier")
    if barriers:
        return (
            f"no order of steps does harm. But it takes {barriers} barriers for 5 rounds, and each costs a "
            "round trip to all ranks. There is a way without any: can you find it?"
        )
    return (
        "no order of steps does harm, and no barrier is needed: a rank that has seen round r + 1 of a peer knows "
        "that the peer has done with round r."
    )


def _steps(got, rounds):
    if isinstance(got, str) or not hasattr(got, "__iter__"):
        raise Wrong(f"program must return a list of steps, not {got!r}")
    steps = [" ".join(str(step).split()) for step in got]
    for i, step in enumerate(steps):
        if not STEP.match(step):
            raise Wrong(
                f"step {i} of program({rounds}) is {step!r}; the steps are send 0, send 1, wait 0, wait 1 and "
                "barrier: there are two buffers"
            )
    for word in ("send", "wait"):
        n = sum(step.startswith(word) for step in steps)
        if n != rounds:
            times = f"{n} time{'s' * (n != 1)}"
            raise Wrong(f"program({rounds}) {word}s {times}; it must {word} once per round, here {rounds}")
    return steps
