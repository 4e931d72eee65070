"""The holes of a puzzle's file, between two marks, and the answers that fill them."""

import importlib.util
import re
import textwrap

from epmoe.puzzles import ANSWERS, FILES
from epmoe_ref.errors import UnavailableError

HOLE = re.compile(r"^( *)# ---- your .*?\n(.*?)^ *# -{10,}\n", re.MULTILINE | re.DOTALL)


def filled(start, holes):
    """The file with the text of each hole in its place, indented as far as its marks."""
    rest = iter(holes)

    def fill(found):
        text = textwrap.indent(textwrap.dedent(next(rest)).strip("\n"), found[1])
        first, last = found[0].splitlines()[0], found[0].splitlines()[-1]
        return f"{first}\n{text}\n{last}\n"

    made = HOLE.sub(fill, start)
    assert next(rest, None) is None, "as many texts as holes"
    return made


def holes_of(source):
    """The text in each hole."""
    return [found[2] for found in HOLE.finditer(source)]


def named_holes(source):
    """[(function around it, text)] of each hole."""
    return [
        (re.findall(r"^ *def (\w+)", source[: found.start()], re.MULTILINE)[-1], found[2])
        for found in HOLE.finditer(source)
    ]


def answers(number):
    """The module with EXPLANATION, RIGHT and WRONG of a puzzle; UnavailableError if this installation has none."""
    path = ANSWERS / f"{FILES[number][:3]}.py"
    if not path.exists():
        raise UnavailableError(
            "the answers are not installed with epmoe: they are in the repository, in tests/puzzles/answers"
        )
    spec = importlib.util.spec_from_file_location(f"puzzle_answers_{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
