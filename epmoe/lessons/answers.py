"""A student's file: loaded, its functions called, and every way in which that can fail told in words."""

import importlib.util
import sys
import traceback
from pathlib import Path

from epmoe_ref.errors import EPError


class Wrong(EPError):
    """The answer is not right yet; the message says what is wrong and where to look."""


def load(file, number="N"):
    """The module of a student's file, the answer to exercise `number`. Raises Wrong where it cannot be read."""
    path = Path(file)
    if not path.exists():
        raise Wrong(f"there is no file {file}: `python -m epmoe lesson {number} --start {file}` writes one to fill in")
    spec = importlib.util.spec_from_file_location("answer", path)
    if spec is None:
        raise Wrong(f"{file} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except Wrong:
        raise
    except SyntaxError as error:
        raise Wrong(f"{path.name} line {error.lineno} is not Python: {error.msg}") from None
    except Exception as error:
        raise Wrong(failed(path, error, "while the file was read")) from None
    finally:
        sys.dont_write_bytecode = kept
    return module


def function(answer, name):
    """The student's function of that name."""
    made = getattr(answer, name, None)
    if not callable(made):
        raise Wrong(f"{Path(answer.__file__).name} has no function {name}: keep the name that --start wrote")
    return made


def call(answer, name, *arguments):
    """What the student's function returns."""
    try:
        result = function(answer, name)(*arguments)
    except Wrong:
        raise
    except Exception as error:
        shown = ", ".join(map(_short, arguments))
        raise Wrong(failed(answer.__file__, error, f"in {name}({shown})")) from None
    if result is None:
        raise Wrong(f"{name} returns None: it has no return yet, or one of its ways has none")
    return result


def failed(file, error, where):
    """"answer1.py line 12: IndexError in f(3): index 4 is out of range"."""
    file = Path(file)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
    at = f"{file.name} line {lines[-1]}" if lines else file.name
    said = str(error) or "no message"
    return f"{at}: {type(error).__name__} {where}: {said}"


def _short(argument):
    text = " ".join(repr(argument).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
