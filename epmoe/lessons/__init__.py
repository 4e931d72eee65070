"""Ten lessons on expert parallelism, each a file that reads as an article and runs: `epmoe lesson N`.

| file | |
|---|---|
| lessonN_*.py | the article: comments are its text; its code runs and prints |
| exerciseN.py | the student's empty file, and the judge of the finished one: two numbers and code |
| telling.py | prints a lesson: text, code, output |
| judge.py | judges a student's file in a separate process |
| answers.py | loads a student's file and calls its functions |
| number_questions.py | judges a number, and recognises the usual mistakes |
| command.py | the command line |
| broken_kernel.py | for lesson 4: the plain kernels with one release relaxed |
| two_dispatches.py, silent_rank.py | for lesson 5: dispatches in a row; a rank that never sends |
| mailbox_model.py | for exercise 5: a search of every order of sends and waits |
| measured.py | for lessons 6 and 9: the result files of the benchmarks |
| own_routing.py | for lesson 7: the reader's own routing |
"""

from importlib import import_module
from pathlib import Path

_FOUND = {int(path.stem[6:].partition("_")[0]): path for path in Path(__file__).parent.glob("lesson*_*.py")}
FILES = dict(sorted(_FOUND.items()))


def exercise(number):
    """The module of a lesson's exercises.

    WARM_UP, STRETCH: a number_questions.Number each. STUB: the code of a new answer. judge(answer): what is right about the code;
    raises Wrong.
    """
    return import_module(f"{__name__}.exercise{number}")
