"""Loads a student's file and calls its functions; explains every way in which that can fail."""

import copy
import re
import traceback
from pathlib import Path
from shlex import quote
from types import ModuleType

import numpy as np

from epmoe_ref.errors import EPError, EPValueError


class Wrong(EPError):
    """The answer is not right yet; the message says what is wrong and where to look."""


def load(file, number="N", command="lesson"):
    """The module of a student's file, the answer to exercise (or puzzle) `number`; Wrong if it fails, EPValueError if none is there."""
    path = Path(file).absolute()
    if not path.exists():
        raise EPValueError(
            f"there is no file {file}: `epmoe {command} {number} --start {quote(str(file))}` writes one to fill in"
        )
    if not path.is_file():
        raise EPValueError(f"{file} is not a file: name the one that --start wrote")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise EPValueError(f"{file} cannot be read: {error.strerror}") from None
    module = ModuleType("answer")
    module.__file__ = str(path)
    try:
        exec(compile(source, path, "exec"), vars(module))
    except SyntaxError as error:
        at = f" line {error.lineno}" if error.lineno else ""
        raise Wrong(f"{path.name}{at} is not Python: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise Wrong(failed(path, error, "while the file was read")) from None
    return module


def function(answer, name):
    """The student's function of that name."""
    made = getattr(answer, name, None)
    if not callable(made):
        of = re.match(r"The exercises of lesson \d+", answer.__doc__ or "")
        has = f"{Path(answer.__file__).name} has {f'{of[0].lower()}, and ' if of else ''}no function {name}"
        raise Wrong(f"{has}: keep the name that --start wrote")
    return made


def call(answer, name, *arguments):
    """What the student's function returns; the arguments must be left as they are."""
    given, called = copy.deepcopy(arguments), function(answer, name)
    try:
        result = called(*given)
    except (Exception, SystemExit) as error:
        shown = ", ".join(map(_short, arguments))
        raise Wrong(failed(answer.__file__, error, f"in {name}({shown})")) from None
    if result is None:
        raise Wrong(f"{name} returns None: it has no return yet, or a path without one")
    for number, (mine, theirs) in enumerate(zip(arguments, given), 1):
        if not _same(mine, theirs):
            raise Wrong(
                f"{name} changes its argument {number}, which others still need: work on a copy of it. "
                f"{_short(mine)} became {_short(theirs)}"
            )
    return result


def whole_numbers(got, name):
    """A function's result as an array of exact Python integers; raises Wrong for anything else."""
    try:
        made = np.asarray(got)
    except (TypeError, ValueError) as error:
        raise Wrong(f"{name} must return whole numbers; {error}") from None
    if made.dtype.kind not in "iu" and made.size and not all(type(n) is int for n in made.reshape(-1).tolist()):
        raise Wrong(
            f"{name} must return whole numbers (rows and slots are counted), not {_short(got)} of type "
            f"{made.dtype}: np.zeros and / make floats; dtype=int and // do not"
        )
    return made.astype(object)


def _same(mine, theirs):
    if isinstance(mine, (list, tuple)):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(_same, mine, theirs))
    return np.array_equal(mine, theirs)


def failed(file, error, where):
    """ "answer1.py line 12: IndexError in f(3): index 4 is out of range"."""
    file = Path(file)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
    at = f"{file.name} line {lines[-1]}" if lines else file.name
    said = str(error) or "no message"
    return f"{at}: {type(error).__name__} {where}: {said}"


def _short(argument):
    text = " ".join(repr(argument).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
