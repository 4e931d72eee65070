"""Progress of a long command: a bar in a terminal, otherwise a line on stderr every few seconds."""

import contextlib
import sys
import time

EVERY_S = 10


class _Lines:
    """Prints `mutants: 12 of 400, 20 s` to stderr, at most every EVERY_S seconds."""

    def __init__(self, what, total):
        self._begin = self._said = time.monotonic()
        self.start(what, total)

    def start(self, what, total):
        self._what, self._total, self._done = what, total, 0

    def advance(self, n=1):
        self._done += n
        now = time.monotonic()
        if now - self._said >= EVERY_S:
            self._said = now
            sys.stderr.write(f"{self._what}: {self._done} of {self._total}, {now - self._begin:.0f} s\n")
            sys.stderr.flush()


class _Bar:
    """The same as a bar of rich."""

    def __init__(self, shown, what, total):
        self._shown = shown
        self._task = shown.add_task(what, total=total)

    def start(self, what, total):
        self._shown.update(self._task, description=what, completed=0, total=total)

    def advance(self, n=1):
        self._shown.advance(self._task, n)


@contextlib.contextmanager
def progress(console, what, total, hidden=False):
    """Context of an object with advance(), to call after each of `total` steps, and start(what, total) for a new bar.

    advance(n): after n of them.

    hidden: print nothing, on ranks other than the first.
    """
    if hidden or not console.is_terminal:
        lines = _Lines(what, total)
        if hidden:
            lines.advance = lambda n=1: None
        yield lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        yield _Bar(shown, what, total)
