"""`python -m epmoe lesson`: lists, tells and judges the lessons."""

import contextlib
import signal
import sys
from pathlib import Path

from epmoe.command_line import CANNOT_RUN, DIFFERS, EQUAL
from epmoe.lessons import FILES, exercise
from epmoe.lessons.answers import Wrong, load
from epmoe.lessons.telling import WIDTH, exercise_text, plain_simulator, tell, title, wrapped

PATIENCE_S = 60     # for judging an answer
HERE = "here"       # --start and --check without a file


def add_arguments(parser):
    """The options of lesson."""
    parser.add_argument("number", nargs="?", type=int, choices=sorted(FILES), metavar="N",
                        help="1 to 6; without it the lessons are listed")
    parser.add_argument("--step", action="store_true", help="wait for Enter before each section")
    parser.add_argument("--start", nargs="?", const=HERE, metavar="FILE",
                        help="write the file in which the exercise is answered (default answerN.py)")
    parser.add_argument("--check", nargs="?", const=HERE, metavar="FILE", help="judge such a file (default answerN.py)")


def run(args):
    """Do what was asked; the exit status is 0, 1 if an answer is not right, 2 if something cannot be done."""
    if args.number is None:
        if args.start or args.check:
            return _cannot("--start and --check need a number: python -m epmoe lesson 1 --start")
        return listed()
    own = f"answer{args.number}.py"
    if args.start:
        return start(args.number, own if args.start == HERE else args.start)
    if args.check:
        return check(args.number, own if args.check == HERE else args.check)
    tell(FILES[args.number], pause=args.step)
    print(_how_to_answer(args.number))
    return EQUAL


def listed():
    """The lessons by number and title."""
    print("Six lessons on expert parallelism. Each is a Python file that reads as an\n"
          "article, runs on a CPU within a minute, and ends with an exercise.\n")
    for number, file in FILES.items():
        print(f"  {number}  {title(file.read_text(encoding='utf-8')).partition(': ')[2].rstrip('.')}")
    print("\npython -m epmoe lesson N           tells lesson N  (--step: section by section)\n"
          "python -m epmoe lesson N --start   writes answerN.py, for your answer\n"
          "python -m epmoe lesson N --check   judges it, and says what is wrong\n\n"
          f"To read them: {_shown(FILES[1].parent)}")
    return EQUAL


def start(number, file):
    """Write the file of an exercise: the question, and code to fill in."""
    path = Path(file)
    if path.exists():
        return _cannot(f"{file} exists and is left alone: give another name, --start {path.stem}_2.py")
    try:
        with plain_simulator():
            path.write_text(new_answer(number), encoding="utf-8")
    except OSError as error:
        return _cannot(f"{file} cannot be written: {error.strerror}")
    print(f"{file} is written: fill it in, then\n  python -m epmoe lesson {number} --check {file}")
    return EQUAL


def new_answer(number):
    """The text of a file to be filled in."""
    question = exercise_text(FILES[number].read_text(encoding="utf-8"))
    return f'"""Exercise {number}.\n\n{question}\n"""\n\n{exercise(number).STUB.lstrip()}'


def check(number, file):
    """Judge an answer, in words."""
    try:
        with plain_simulator(), _limited():
            praise = exercise(number).judge(load(file, number))
    except Wrong as error:
        print(wrapped(f"NOT YET  {error}", WIDTH))
        return DIFFERS
    print(wrapped(f"RIGHT  {praise}", WIDTH))
    return EQUAL


@contextlib.contextmanager
def _limited():
    """Wrong is raised in what takes too long, where the system can do so."""
    def give_up(*_):
        raise Wrong(f"it still runs after {PATIENCE_S} seconds: is there a loop that does not end?")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    others = signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def _how_to_answer(number):
    return (f"  python -m epmoe lesson {number} --start     writes answer{number}.py\n"
            f"  python -m epmoe lesson {number} --check     judges it")


def _shown(folder):
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _cannot(why):
    print(f"epmoe lesson: {why}", file=sys.stderr)
    return CANNOT_RUN
