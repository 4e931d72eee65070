"""Runs an implementation's cases in another process, which may hang, crash or exit. Each case gets an Outcome."""

import contextlib
import itertools
import os
import signal
import tempfile
import time
from pathlib import Path

from epmoe import guard
from epmoe.check.conformance import Outcome
from epmoe.check.difference import Difference
from epmoe_ref.errors import EPValueError

START_S = 300  # at least this long for imports and compilation
MOST_LOST = 3  # after this many cases without an answer, no more are tried
ADAPTERS = f"{os.sep}adapters{os.sep}"
STACK_S, FRAMES = 2, 8  # seconds to wait for a stack, and how many of its lines are shown


def outcomes(report, only, timeout, output=None, timeout_option="--timeout"):
    """Run the cases of a new Report, and yield the Outcome of each when it is known. EPValueError if it cannot be run.

    only: as for conformance.chosen. timeout: seconds for a case, named in messages as the option that sets it. output:
    where the implementation's prints go, as for subprocess; default: this process's stdout.
    """
    lost = 0
    while True:
        task = dict(name=report.name, ranks=report.n_ranks, only=only)
        cases, why = yield from _some_cases(report, task, timeout, timeout_option, output)
        if why is None:
            return
        lost += 1
        rest = cases[len(report.outcomes) :]
        yield _added(report, Outcome(rest[0], (why,)))
        for case in rest[1:] if lost == MOST_LOST else ():
            not_run = f"not run after {lost} cases without an answer"
            yield _added(report, Outcome(case, not_served=not_run))
        if len(report.outcomes) == len(cases):
            return


def _added(report, outcome):
    report.outcomes.append(outcome)
    return outcome


def _some_cases(report, task, timeout, timeout_option, output):
    """Run cases until one is lost, and yield their outcomes. Returns (names of all cases, why it was lost or None)."""
    cases, end, call = [], None, ""
    task["first"] = len(report.outcomes)
    with (
        tempfile.TemporaryDirectory() as folder,
        guard.process("epmoe.check.child", task | {"stack": f"{folder}/stack"}, output) as started,
    ):
        process, lines = started
        for what, *rest in lines(lambda: max(0, end - time.monotonic()) if end else max(timeout, START_S)):
            if what == "cannot":
                raise EPValueError(rest[0])
            if what == "call":
                (call,) = rest
                continue
            if what == "cases":
                cases, report.n_ranks = rest
            elif what == "done":
                yield _added(report, Outcome.of_record(rest[0]))
            end = time.monotonic() + timeout if what == "begin" else None
            if not end and len(report.outcomes) == len(cases):
                return cases, None
        if process.late:
            limit = timeout if end else max(timeout, START_S)
            says = f"did not return within {limit:g} s" + (f" ({timeout_option})" if end else "")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        else:
            says = guard.how_it_ended(process)
        stack = _stack(Path(folder) / "stack", wait=process.late)
    if not end:
        raise EPValueError(f"{task['name']} {says}, outside of any case")
    return cases, Difference(call or "call", says + stack)


def _stack(file, wait):
    """The innermost lines of a stack that faulthandler wrote, each on a line of its own; "" if there are none."""
    end = time.monotonic() + STACK_S * wait
    while not (lines := file.read_text().splitlines() if file.exists() else []):
        if time.monotonic() >= end:
            return ""
        time.sleep(0.05)
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    ours = f'File "{Path(__file__).parent}{os.sep}'
    own = list(itertools.takewhile(lambda f: not f.startswith(ours) or ADAPTERS in f, frames))
    return "".join(f"\n  at {frame}" for frame in (own or frames)[:FRAMES])
