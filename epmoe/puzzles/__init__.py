"""Puzzles: kernels with a hole of a few lines, from copying a row to a dispatch and a combine of one's own.

| file | |
|---|---|
| pNN_*.py | one puzzle: the file to fill in, hints, worlds, and the mistakes that it can tell apart |
| world.py, given.py | memory, launches and schedules; what a kernel is given |
| judging.py, pictures.py | the verdict in words; memory as it should be and as it is |
| child.py, limits.py | judges a file in a process of its own, which cannot write, connect or start others |
| own_kernels.py, own_implementation.py | for puzzles 15 and 16: each synchronisation lost in turn; `epmoe check` |
| grading.py | judges a folder of answers |
| on_gpu.py | runs an answer on a GPU |
| command.py | the command line |

The answers are in tests/puzzles/answers, outside the wheel.
"""

from importlib import import_module
from pathlib import Path

FILES = {int(path.name[1:3]): path.stem for path in sorted(Path(__file__).parent.glob("p[0-9]*.py"))}
ANSWERS = Path(__file__).parents[2] / "tests" / "puzzles" / "answers"  # in a checkout only


def puzzle(number):
    """The Puzzle of that number."""
    return import_module(f"{__name__}.{FILES[number]}").PUZZLE
