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
    return verdict_of(__name__, [number, file], PATIENCE_S, output=output)


def verdict_of(module, task, patience_s, **how):
    """What `python -m module` says of its task in the end: ("right" or "wrong", words). how: as for guard.process.

    It may say ["begun", ""] before, and then has patience_s seconds more.
    """
    with guard.process(module, task, **how) as (process, lines):
        for what, says in lines(lambda: patience_s):
            if what == "cannot":
                raise EPValueError(says)
            if what != "begun":
                return what, says
        if process.late:
            return (
                "wrong",
                f"it still runs after {patience_s} seconds: is there a loop that does not end?",
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
