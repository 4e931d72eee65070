"""The holes of a puzzle's file, between two marks, and the answers that fill them."""

import ast
import importlib.util
import re
import textwrap

from epmoe.puzzles import ANSWERS, FILES
from epmoe_ref.errors import UnavailableError

HOLE = re.compile(r"^( *)# ---- your .*?\n(.*?)^ *# -{10,}(?:\n|\Z)", re.MULTILINE | re.DOTALL)


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


def changed(start, source):
    """What is not as in the start file outside the holes, in words; "" if the marks and all given functions are there."""
    marks, wanted = (len(holes_of(text)) for text in (source, start))
    if marks != wanted:
        return (
            f"has {marks} of {wanted} pairs of the lines `# ---- your ... lines ----` and `# -----...`: the judge finds "
            "your lines between them"
        )
    try:
        given, found = _functions(start), _functions(source)
    except SyntaxError:
        return "is no Python without your lines: an expression or a block goes beyond the marks"
    name = next((name for name in reversed(given) if found.get(name) != given[name]), None)
    return f"has other lines than that file in {name}, outside the marks: only your lines are judged" if name else ""


def own_lines(start, source):
    """The numbers of the lines in the holes, and of lines elsewhere that the start file does not have."""
    own, given = set(), {line.strip() for line in start.splitlines()}
    for hole in HOLE.finditer(source):
        first = source.count("\n", 0, hole.start(2)) + 1
        own |= set(range(first, first + hole[2].count("\n")))
    return own | {n for n, line in enumerate(source.splitlines(), 1) if line.strip() not in given}


def _functions(source):
    """{name: its code without what is in the holes}, outer functions first."""
    tree = ast.parse(HOLE.sub(r"\1pass\n", source))
    return {node.name: ast.dump(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


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
