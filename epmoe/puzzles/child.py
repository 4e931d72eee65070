"""Judges one file in a process of its own, with limits, which `puzzle N --check` and `--grade` start.

It says ["begun", ""] before it reads the file and after each part of the judgement. Then it says ["right", praise],
["wrong", what is wrong], or ["cannot", why] if there is no file to judge.
"""

from epmoe import guard
from epmoe.lessons.answers import Wrong, load
from epmoe.lessons.judge import verdict_of
from epmoe.lessons.telling import plain_simulator
from epmoe_ref.errors import EPValueError

PATIENCE_S = 9
MODULE = "epmoe.puzzles.child"


def verdict(number, file, sealed=False, **how):
    """("right" or "wrong", words) of the answer to puzzle `number` in a file; EPValueError if there is none.

    sealed: the process has namespaces of its own, and closes its file systems. how: as for verdict_of.
    """
    task = dict(number=number, file=str(file), sealed=sealed)
    return verdict_of(MODULE, task, PATIENCE_S, **how)


def run(task, say):
    """Judge the file of task, {"number", "file", "sealed"}."""
    from epmoe.puzzles import limits, puzzle
    from epmoe.puzzles.judging import judge

    number, file = task["number"], task["file"]
    with plain_simulator():
        asked = puzzle(number)
        if task["sealed"]:
            limits.seal(".")
        refused = limits.apply(".")
        say(["begun", ""])
        try:
            praise = judge(asked, load(file, number, "puzzle"), tell=lambda: say(["begun", ""]))
            say(["wrong", f"it {refused[0]}"] if refused else ["right", praise])
        except MemoryError:
            say(["wrong", "it takes more than 1 GiB of memory"])
        except Wrong as error:
            says = str(error).replace("no message", "more than 1 GiB of memory")
            if refused and refused[0] not in says:
                says = f"it {refused[0]}, which no answer needs"
            say(["wrong", says])
        except EPValueError as error:
            say(["cannot", str(error)])


if __name__ == "__main__":
    guard.child(run)
