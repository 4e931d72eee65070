"""Exercise 5: rounds of dispatch alone, in a safe order."""

import re

from epmoe.lessons.answers import Wrong, call
from epmoe.lessons.mailbox_model import explore, told

STUB = '''
def program(rounds):
    """The steps of every rank, a list of words such as ["send 0", "wait 0", "barrier"]."""
    steps = []
    for i in range(rounds):
        steps += ["send 0", "wait 0"]
    return steps
'''

STEP = re.compile(r"(send|wait) [01]$|barrier$")
# ranks, rounds; the last ones for what goes wrong late
WORLDS = (
    (2, 1),
    (2, 2),
    (2, 3),
    (2, 5),
    (3, 3),
    *((2, n) for n in (*range(6, 20), 33, 64, 257, 1000)),
    (3, 7),
)


def judge(answer):
    """What was right; raises Wrong."""
    for n_ranks, rounds in WORLDS:
        steps = _steps(call(answer, "program", rounds), rounds)
        found = explore(steps, n_ranks)
        if found:
            what, path = found
            way = (
                f" The shortest way there, each line a step that was begun:\n{told(steps, path)}"
                if path
                else ""
            )
            raise Wrong(f"with {n_ranks} ranks, program({rounds}): {what}.{way}")
    barriers = _steps(call(answer, "program", 5), 5).count("barrier")
    if barriers:
        return (
            f"no order of steps does harm. It takes {barriers} barriers for 5 rounds, though, and each costs a "
            "journey to all ranks and back. There is a way without any: can you find it?"
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
            raise Wrong(
                f"program({rounds}) has {n} times {word}; {rounds} rounds need {rounds}: each round is sent "
                "once and waited for once"
            )
    return steps
