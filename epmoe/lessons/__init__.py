"""Ten lessons on expert parallelism, each a file that reads as an article and runs: `epmoe lesson N`.

| file | |
|---|---|
| lessonN_*.py | the article: comments are its text, code runs and prints in step |
| exerciseN.py | what the student's file holds at first, and the judge of what it holds later: two numbers and code |
| telling.py | reads a lesson's file and tells it: text, code, output |
| judge.py | judges a student's file in a process of its own |
| answers.py | loads a student's file and calls its functions |
| number_questions.py | judges a number, with the usual mistakes told apart |
| command.py | the command line |
| broken_kernel.py | for lesson 4: the project's kernels with one synchronisation lost |
| two_dispatches.py, mailbox_model.py | for lesson 5: dispatches in a row; every order of sends and waits tried out |
| measured.py | for lesson 6: the files of results |
"""

from importlib import import_module
from pathlib import Path

_FOUND = {
    int(path.stem[6:].partition("_")[0]): path
    for path in Path(__file__).parent.glob("lesson*_*.py")
}
FILES = dict(sorted(_FOUND.items()))


def exercise(number):
    """The module of a lesson's exercises.

    WARM_UP, STRETCH: a number_questions.Number each. STUB: the code of a new answer. judge(answer): what is right about the code;
    raises Wrong.
    """
    return import_module(f"{__name__}.exercise{number}")
