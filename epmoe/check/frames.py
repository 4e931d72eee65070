"""Chooses the lines of a stack that belong to an implementation, not to epmoe or to an installed library."""

import inspect
import itertools
import os
import re
import sysconfig
import traceback
from pathlib import Path

FRAMES = 8  # of a stack, shown
CHECK = Path(__file__).parent
EPMOE = tuple(f"{CHECK.parents[1]}{os.sep}{package}{os.sep}" for package in ("epmoe", "epmoe_ref"))
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
OF_CHECK = re.compile(f'File "{re.escape(str(CHECK))}{os.sep}(?!adapters)')


def innermost(frames):
    """The innermost frames, up to the check that called them, each on a line of its own.

    frames: `File "...", line N in function`, the innermost first.
    """
    own = list(itertools.takewhile(lambda frame: not OF_CHECK.match(frame), frames))
    return "".join(f"\n  at {frame}" for frame in (own or frames)[:FRAMES])


def told(stack):
    """`innermost` of a traceback.StackSummary."""
    return innermost([f'File "{f.filename}", line {f.lineno} in {f.name}' for f in reversed(stack)])


def where(error, called=None):
    """The innermost line of an exception that is the implementation's own, as ` (file:line)`. If there is none, the
    place of `called`, the function that could not be called."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))] or frames
    code = getattr(inspect.unwrap(called), "__code__", None) if called else None
    for frame in reversed(frames):
        if not frame.filename.startswith(EPMOE):
            return f" ({frame.filename}:{frame.lineno})"
    if code and not code.co_filename.startswith(EPMOE):
        return f" ({code.co_filename}:{code.co_firstlineno})"
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
