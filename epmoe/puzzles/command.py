"""`epmoe puzzle`: lists the puzzles, writes the file of one, judges it, gives hints, shows the answer."""

import ast
import hashlib
import json
import textwrap
from contextlib import suppress
from pathlib import Path
from shlex import quote

from epmoe.command_line import DIFFERS, EQUAL, at_least_one, new_file, number_of_one
from epmoe.lessons.telling import WIDTH, plain_simulator, wrapped
from epmoe.puzzles import FILES, puzzle
from epmoe_ref.errors import EPValueError

STDERR = 2  # where an answer prints while stdout holds JSON
SOLVED = ".puzzles_solved.json"  # {file: digest of the text that was right}


def add_arguments(parser):
    """The options of puzzle."""
    number_of_one(parser, FILES, "puzzles")
    what = parser.add_mutually_exclusive_group()
    for name, does in ("--start", "write the file to fill in"), ("--check", "judge your answer"):
        says = f"{does} (default puzzleNN.py)"
        what.add_argument(name, nargs="?", const=True, metavar="FILE", help=says)
    what.add_argument("--hint", nargs="?", const=1, type=at_least_one, metavar="K", help="give hint K (default 1)")
    what.add_argument("--show", action="store_true", help="print the answer and the reason (in a checkout)")
    what.add_argument("--grade", metavar="DIR", help="judge a folder of answers: one file or folder for each student")
    parser.add_argument("--gpu", action="store_true", help="with --check: also run a right answer on a GPU")
    parser.add_argument("--json", action="store_true", help="with --check and --grade: one JSON object")


def run(args):
    """Do what was asked; the exit status is 0, 1 if an answer is not right, 2 if something cannot be done."""
    if args.json and not (args.check or args.grade):
        raise EPValueError("--json goes together with --check or --grade: it is about verdicts")
    if args.gpu and not args.check:
        raise EPValueError("--gpu goes together with --check: it runs a right answer on a GPU")
    if args.grade:
        from epmoe.puzzles.grading import grade

        return grade(Path(args.grade), args.number, args.json)
    asked = args.start or args.check or args.hint or args.show
    if args.number is None:
        if asked:
            raise EPValueError("--start, --check, --hint and --show need a number: epmoe puzzle 1 --start")
        return listed()
    own = file_of(args.number)
    with plain_simulator():
        if args.start:
            return start(args.number, own if args.start is True else args.start)
        if args.hint:
            return hint(args.number, args.hint)
        if args.show:
            return show(args.number)
        if not args.check:
            return told(args.number)
    return check(args.number, own if args.check is True else args.check, args.json, args.gpu)


def file_of(number):
    """The name of a student's file."""
    return f"puzzle{number:02}.py"


def listed():
    """The puzzles: number, name, one line, and whether the one in this folder is solved."""
    print(
        "Kernels with a hole of a few lines, from copying rows to your own dispatch.\n"
        "They need lessons 1 to 5 (epmoe lesson), a CPU and a text editor.\n"
    )
    with plain_simulator():
        for number in FILES:
            asked = puzzle(number)
            print(f"{number:4}  {asked.title:40} {state(number)}".rstrip())
            print(f"      {asked.line}")
    print(
        f"\nepmoe puzzle N           says what to do\n"
        f"epmoe puzzle N --start   writes {file_of(1).replace('01', 'NN')}, with the hole to fill\n"
        "epmoe puzzle N --check   judges it, and says what is wrong\n"
        "epmoe puzzle N --hint    gives a hint; --hint 2 a stronger one\n"
        "epmoe puzzle N --show    prints the answer and why it is so"
    )
    return EQUAL


def state(number):
    """ "solved", "begun", or "" if the folder has no file for it."""
    path = Path(file_of(number))
    if not path.exists():
        return ""
    return "solved" if _solved().get(path.name) == _digest(path) else "begun"


def told(number):
    """What the puzzle asks, and what to do next."""
    print(ast.get_docstring(ast.parse(puzzle(number).start)))
    print(f"\nepmoe puzzle {number} --start     writes {file_of(number)}\nepmoe puzzle {number} --check     judges it")
    return EQUAL


def start(number, file):
    """Write the file of a puzzle."""
    path = new_file(file)
    path.write_text(puzzle(number).start, encoding="utf-8")
    named = "" if file == file_of(number) else f" {quote(file)}"
    print(
        f"{file} is written. Put your lines between the marks, and leave the rest. Then\n  epmoe puzzle {number} --check{named}"
    )
    return EQUAL


def hint(number, k):
    """Print one of the hints, from the first nudge to nearly all."""
    hints = puzzle(number).hints
    if k > len(hints):
        raise EPValueError(f"puzzle {number} has {len(hints)} hints; `epmoe puzzle {number} --show` prints the answer")
    text = hints[k - 1]
    if "\n" in text:  # code
        text = "\n" + textwrap.indent(text, "    ")
    print(wrapped(f"Hint {k} of {len(hints)}: {text}", WIDTH))
    if k < len(hints):
        print(f"\nThe next one: epmoe puzzle {number} --hint {k + 1}")
    return EQUAL


def show(number):
    """Print the explanation and the lines that fill the hole."""
    from epmoe.puzzles.holes import answers, filled, named_holes

    answer = answers(number)
    print(answer.EXPLANATION.strip("\n") + "\n")
    holes = named_holes(filled(puzzle(number).start, answer.RIGHT))
    marks = [f"# hole {i}: {name}\n" if len(holes) > 1 else "" for i, (name, _) in enumerate(holes, 1)]
    shown = [mark + hole.rstrip("\n") for mark, (_, hole) in zip(marks, holes)]
    if tests := getattr(answer, "TESTS", None):
        shown.append(f"TESTS = {tests}")
    print("\n\n".join(shown))
    return EQUAL


def check(number, file, as_json, gpu):
    """Judge a file, in words or as a JSON object; remembers in this folder that it was right."""
    from epmoe.puzzles import child, on_gpu

    output = STDERR if as_json else None
    what, says = child.verdict(number, file, output=output)
    if gpu and what == "right":
        what, more = on_gpu.verdict(number, file, output=output)
        says = f"{says}\n{more}" if what == "right" else more
    right = what == "right"
    if right:
        _remember(Path(file))
    if as_json:
        print(json.dumps({"puzzle": number, "file": file, "passed": right, "verdict": says}, indent=1))
    else:
        print(wrapped(f"{'RIGHT' if right else 'NOT YET'}  {says}", WIDTH))
        if right and number + 1 in FILES:
            print(f"\nNext: epmoe puzzle {number + 1}")
    return EQUAL if right else DIFFERS


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _solved():
    try:
        known = json.loads(Path(SOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(path):
    if path.parent.resolve() == Path.cwd():
        with suppress(OSError):  # a folder that cannot be written still gets its verdict
            Path(SOLVED).write_text(json.dumps(_solved() | {path.name: _digest(path)}, indent=1), encoding="utf-8")
