"""Files that students might hand in: the puzzles' start files with right and wrong answers filled in."""

import textwrap

from epmoe.puzzles import FILES, puzzle
from epmoe.puzzles.holes import answers, filled


def right(number):
    """The texts of all right files of a puzzle."""
    found = answers(number)
    return [_file(number, holes) for holes in [found.RIGHT, *found.ALSO_RIGHT]]


def wrong(number):
    """[(text of a file, words of its cause)]: the right one with edits."""
    found = answers(number)
    return [(edited(number, edits), says) for edits, says in found.WRONG]


def edited(number, edits):
    """The first right file of a puzzle with some words replaced: of its holes, or of its TESTS."""
    holes = [textwrap.dedent(hole) for hole in answers(number).RIGHT]
    for old, new in edits:
        assert any(old in hole for hole in holes) or old == "TESTS = ", old
        holes = [hole.replace(old, new) for hole in holes]
    return _file(number, holes, dict(edits).get("TESTS = "))


def _file(number, holes, tests=None):
    tests = tests or getattr(answers(number), "TESTS", None)
    return filled(puzzle(number).start, holes).replace("\nTESTS = [((1, 0), 1)]\n", f"\nTESTS = {tests}\n")


RIGHT = [(n, i) for n in FILES for i in range(len(right(n)))]
WRONG = [(n, i) for n in FILES for i in range(len(wrong(n)))]
