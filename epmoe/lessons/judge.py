"""Judges an answer in a process of its own, which `lesson N --check` starts and gives ten seconds.

It says ["right", praise] or ["wrong", what is wrong], or ["cannot", why] if there is no answer to judge.
"""

from epmoe import guard
from epmoe.lessons import exercise
from epmoe.lessons.answers import Wrong, load
from epmoe.lessons.telling import plain_simulator
from epmoe_ref.errors import EPValueError

PATIENCE_S = 10


def verdict(number, file, output=None):
    """("right" or "wrong", words) of the answer to exercise `number` in a file; EPValueError if there is none.

    output: where what the answer prints goes, as for subprocess; default: this process's stdout.
    """
    with guard.process(__name__, [number, file], output) as (process, lines):
        for what, says in lines(lambda: PATIENCE_S):
            if what == "cannot":
                raise EPValueError(says)
            return what, says
        if process.late:
            return (
                "wrong",
                f"it still runs after {PATIENCE_S} seconds: is there a loop that does not end?",
            )
        return "wrong", f"the answer {guard.how_it_ended(process)}; it must return instead"


def run(task, say):
    """Load and judge the answer of task, [number, file]."""
    number, file = task
    try:
        with plain_simulator():
            say(["right", exercise(number).judge(load(file, number))])
    except Wrong as error:
        say(["wrong", str(error)])
    except EPValueError as error:
        say(["cannot", str(error)])


if __name__ == "__main__":
    guard.child(run)
