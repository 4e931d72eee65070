"""`epmoe lesson`: lists, tells and judges the lessons."""

import json
from pathlib import Path
from shlex import quote

from epmoe.command_line import DIFFERS, EQUAL, new_file, number_of_one
from epmoe.lessons import FILES, exercise, own_routing
from epmoe.lessons.judge import verdicts
from epmoe.lessons.telling import WIDTH, exercise_text, plain_simulator, tell, title, worked_problems, wrapped
from epmoe_ref.errors import EPValueError

STDERR = 2  # where an answer prints while stdout holds JSON


def add_arguments(parser):
    """The options of lesson."""
    number_of_one(parser, FILES, "lessons")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", action="store_true", help="wait for Enter before each section, and ask for predictions")
    what.add_argument("--answers", action="store_true", help="show the worked problems with their answers")
    for name, does in (
        ("--start", "write the file in which the exercises are answered"),
        ("--check", "judge such a file"),
    ):
        says = f"{does} (default answerN.py)"
        what.add_argument(name, nargs="?", const=True, metavar="FILE", help=says)
    parser.add_argument(
        "--input", metavar="FILE", help="with lesson 7: a routing dump of your model, as `epmoe routing` reads it"
    )
    parser.add_argument("--json", action="store_true", help="with --check: the verdict as one JSON object")


def run(args):
    """Do what was asked; the exit status is 0, 1 if a part is not right, 2 if something cannot be done."""
    if args.json and not args.check:
        raise EPValueError("--json is for verdicts: give it together with --check")
    if args.input and (args.number != 7 or args.answers or args.start or args.check):
        raise EPValueError("only lesson 7 takes --input, without another option: epmoe lesson 7 --input FILE")
    if args.number is None:
        if args.start or args.check or args.step or args.answers:
            raise EPValueError("--step, --answers, --start and --check need a number: epmoe lesson 1 --start")
        return listed()
    if args.answers:
        print(worked_problems(FILES[args.number].read_text(encoding="utf-8")))
        return EQUAL
    file = args.start or args.check
    if file is True:
        file = f"answer{args.number}.py"
    if args.start:
        return start(args.number, file)
    if args.check:
        return check(args.number, file, args.json)
    if args.input:
        own_routing.read(args.input)  # refused before the lesson begins
    own_routing.INPUT = args.input
    try:
        tell(FILES[args.number], pause=args.step)
    finally:
        own_routing.INPUT = None
    print(
        f"  epmoe lesson {args.number} --answers   answers the worked problems\n"
        f"  epmoe lesson {args.number} --start     writes answer{args.number}.py\n"
        f"  epmoe lesson {args.number} --check     judges it"
    )
    return EQUAL


def listed():
    """The lessons by number and title."""
    print(
        "Ten lessons on expert parallelism. Each is a Python file that reads as an\n"
        "article, runs on a CPU within a minute, and ends with worked problems and\n"
        "three exercises.\n"
    )
    for number, file in FILES.items():
        print(f"  {number:2}  {title(file.read_text(encoding='utf-8')).partition(': ')[2].rstrip('.')}")
    folder, here = FILES[1].parent, Path.cwd()
    print(
        "\nepmoe lesson N             prints lesson N  (--step: section by section)\n"
        "epmoe lesson N --answers   shows the answers to its worked problems\n"
        "epmoe lesson N --start     writes answerN.py, for your answers\n"
        "epmoe lesson N --check     judges them, and says what is wrong\n\n"
        f"The files are in {folder.relative_to(here) if folder.is_relative_to(here) else folder}"
    )
    return EQUAL


def start(number, file):
    """Write the file of a lesson's exercises: the questions, and code to fill in."""
    path = new_file(file)
    with plain_simulator():
        path.write_text(new_answer(number), encoding="utf-8")
    print(f"{file} is written: fill it in, then\n  epmoe lesson {number} --check {quote(file)}")
    return EQUAL


def new_answer(number):
    """The text of a file to be filled in."""
    question = exercise_text(FILES[number].read_text(encoding="utf-8"))
    imports, define, code = exercise(number).STUB.strip().partition("def ")
    top = f'"""The exercises of lesson {number}.\n\n{question}\n"""', imports.strip(), "WARM_UP = None  # a number"
    return "\n\n".join(filter(None, top)) + f"\n\n\n{define}{code}\n\n\nSTRETCH = None  # a number\n"


def check(number, file, as_json):
    """Judge the answers of a file part by part, in words or as a JSON object."""
    found = verdicts(number, file, STDERR if as_json else None)
    passed = len(found) == 3 and all(what == "right" for _, what, _ in found)
    if as_json:
        parts = [{"part": p, "passed": what == "right", "verdict": says} for p, what, says in found]
        print(json.dumps({"exercise": number, "file": file, "passed": passed, "parts": parts}, indent=1))
    else:
        for part, what, says in found:
            verdict = "RIGHT" if what == "right" else "NOT YET"
            print(wrapped(f"{verdict:7}  {part}: {says}", WIDTH))
    return EQUAL if passed else DIFFERS
