"""Judges an answer in a separate process, which `lesson N --check` starts and gives ten seconds for each part.

The parts of an exercise are the warm-up (a number), the core (code) and the stretch (a number). The process says
["part", [part, "right" or "wrong", words]] for each and then ["right", ""], or ["wrong", why] if the file cannot be read,
or ["cannot", why] if there is no answer to judge.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from epmoe import guard
from epmoe.lessons import exercise
from epmoe.lessons.answers import Wrong, load
from epmoe.lessons.telling import plain_simulator
from epmoe_ref.errors import EPValueError

PATIENCE_S, START_S = 10, 60  # the start is not the answer's: a busy machine imports slowly
PARTS = ("warm-up", "core", "stretch")
IN_TURN = ("warm-up", "stretch", "core")  # numbers first: code may not end


def verdicts(number, file, output=None):
    """[(part, "right" or "wrong", words)] of the answer to exercise `number` in a file; EPValueError if there is none.

    output: where what the answer prints goes, as for subprocess; default: this process's stdout. A file that cannot be
    read is the only part.
    """
    found = []
    what, says = verdict_of(__name__, dict(number=number, file=file), PATIENCE_S, found.append, output=output)
    if what == "wrong":
        found.append((IN_TURN[len(found)] if found else "the file", what, says))
    return sorted(map(tuple, found), key=lambda part: ("the file", *PARTS).index(part[0]))


def verdict_of(module, task, patience_s, heard=None, *, in_all_s=300, **how):
    """What `python -m module` says of its task in the end: ("right" or "wrong", words). how: as for guard.process.

    task: with the "file" of the answer. The module has START_S seconds to say ["begun", ""], before it reads the file.
    It may say so again, or ["part", x] for heard(x), and then has patience_s seconds more, but no more than in_all_s.
    """
    if sys.stderr.isatty() and "folder" not in how:  # of grading
        print("judging ...", file=sys.stderr)
    end, patience = time.monotonic() + in_all_s, START_S
    with guard.process(module, task, **how) as (process, lines):
        for what, says in lines(lambda: min(patience, end - time.monotonic())):
            patience = patience_s
            if what == "cannot":
                raise EPValueError(says)
            if what == "part":
                heard(says)
            elif what != "begun":
                return what, says
        if process.late:
            at = _where(process, lines, Path(task["file"]).name)
            return "wrong", f"it still runs after {patience_s} seconds{at}: is there a loop that does not end?"
        return "wrong", f"the answer {guard.how_it_ended(process)}; it must return instead"


def _where(process, lines, name):
    """ ", at answer1.py line 12": where a process that is late runs the file of that name; "" if it does not say."""
    with contextlib.suppress(OSError):
        os.write(process.stdin.fileno(), b"?")
    stacks = (says for what, says in lines(lambda: 1) if what == "at")
    return next((f", at {name} line {n}" for stack in stacks for of, n in stack if Path(of).name == name), "")


def run(task, say):
    """Load and judge the answer of task, {"number", "file"}."""
    number, file = task["number"], task["file"]
    try:
        with plain_simulator():
            questions = exercise(number)
            say(["begun", ""])
            answer = load(file, number)
            for part in IN_TURN:
                say(["part", [part, *_judged(questions, part, answer)]])
        say(["right", ""])
    except Wrong as error:
        say(["wrong", str(error)])
    except EPValueError as error:
        say(["cannot", str(error)])


def _judged(questions, part, answer):
    try:
        if part == "core":
            return "right", questions.judge(answer)
        name = part.upper().replace("-", "_")
        return "right", getattr(questions, name).judge(answer, name)
    except Wrong as error:
        return "wrong", str(error)


if __name__ == "__main__":
    guard.child(run)
