"""Runs an implementation that may hang, crash or exit: its cases in another process, each of which gets an Outcome.

With one rank a process it runs in this one, and a failure of this rank ends all ranks.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from epmoe import guard
from epmoe.check.calls import progress
from epmoe.check.conformance import Outcome
from epmoe.check.difference import Difference
from epmoe.check.frames import innermost, told
from epmoe.check.ranks import process_number
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

START_S = 300  # at least this long for imports and compilation
SILENT_S = 5  # after this long in them, a line says so
MOST_LOST = 3  # after this many cases without an answer, no more are tried
STACK_S = 2  # to wait for a stack
TOGETHER_S = 2  # for other ranks to report the same failure
STDERR = 2


def outcomes(report, only, timeout, output=None, timeout_option="--timeout", begin=None):
    """Run the cases of a new Report, and yield the Outcome of each when it is known. EPValueError if it cannot be run.

    only: as for conformance.chosen. timeout: seconds for a case, named in messages as the option that sets it. output:
    where the implementation's prints go, as for subprocess; default: this process's stdout. begin: called with the
    number of cases before the first one.
    """
    lost = 0
    while True:
        task = dict(name=report.name, ranks=report.n_ranks, only=only)
        cases, why = yield from _some_cases(report, task, timeout, timeout_option, output, begin)
        if why is None:
            return
        lost, begin = lost + 1, None
        rest = cases[len(report.outcomes) :]
        yield _added(report, Outcome(rest[0][0], (why,)))
        for case, not_served in rest[1:] if lost == MOST_LOST else ():
            not_run = None if not_served else f"{lost} cases before it gave no answer"
            yield _added(report, Outcome(case, not_served=not_served, not_run=not_run))
        if len(report.outcomes) == len(cases):
            return


def _added(report, outcome):
    report.outcomes.append(outcome)
    return outcome


def _some_cases(report, task, timeout, timeout_option, output, begin):
    """Run cases until one is lost, and yield their outcomes. Returns ([(name, why not served)], why lost or None)."""
    cases, end, call = [], None, ("", None)
    start_s = max(timeout, START_S)
    silent = (
        f"epmoe check: {task['name']}: still importing or compiling after {SILENT_S} s; the limit is {start_s:g} s\n"
    )
    task["first"] = len(report.outcomes)
    with (
        _timer(SILENT_S, sys.stderr.write, silent) as starting,
        tempfile.TemporaryDirectory() as folder,
        guard.process("epmoe.check.child", task | {"stack": f"{folder}/stack"}, output) as started,
    ):
        Path(folder, "stack").touch()
        process, lines = started
        for what, *rest in lines(lambda: max(0, end - time.monotonic()) if end else start_s):
            if what == "cannot":
                raise EPValueError(rest[0])
            if what == "call":
                call = rest
                continue
            if what == "cases":
                cases, report.n_ranks = rest
                starting.cancel()
                if begin:
                    begin(len(cases))
            elif what == "done":
                yield _added(report, Outcome.of_record(rest[0]))
            end = time.monotonic() + timeout if what == "begin" else None
            if not end and len(report.outcomes) == len(cases):
                return cases, None
        if process.late:
            limit = timeout if end else start_s
            says = f"did not return within {limit:g} s" + (f" ({timeout_option})" if end else "")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        else:
            says = guard.how_it_ended(process)
        stack = _stack(Path(folder) / "stack", wait=process.late)
    if not end:
        raise EPValueError(f"{task['name']} {says}, outside of any case")
    return cases, Difference(call[0] or "call", says + stack, round=call[1])


def _stack(file, wait):
    """The innermost lines of a stack that faulthandler wrote, each on a line of its own; "" if there are none."""
    end, text, before = time.monotonic() + STACK_S * wait, file.read_text(), None
    while not (text and text == before) and time.monotonic() < end:  # until all of it is written
        time.sleep(0.05)
        text, before = file.read_text(), text
    return innermost([line.strip() for line in text.splitlines() if line.startswith("  File ")])


@contextlib.contextmanager
def _timer(seconds, function, *arguments):
    """Calls the function after these seconds unless the context has ended, or the timer was cancelled."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


@contextlib.contextmanager
def as_rank(name, case, timeout, option="--timeout", tell=None):
    """Run a case in this rank, while the other ranks are other processes. All ranks end with status 1 if it raises, ends
    the process, or lasts too long.

    case: its name, or None before the first one, when an EPError is raised. In a case an UnavailableError of `make` is.
    tell: called with the Difference before the end.
    """
    leave, this_process, main = os._exit, os.getpid(), threading.main_thread().ident
    ending = threading.Lock()

    def all_end(says, stack):
        ending.acquire()  # the timer's thread and the main thread: only the first one goes on
        rank, when = process_number(), f"case {case!r}: {progress}" if case else "before the first case it"
        if tell:
            what, round_ = (progress.call or "call", progress.round) if case else ("import", None)
            tell(Difference(what, says + told(stack), rank=rank, round=round_))
        lines = f"epmoe check: {name}: {when} {says}; all ranks end{told(stack)}".splitlines()
        sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in lines))  # in one piece
        sys.stderr.flush()
        time.sleep(TOGETHER_S)
        _end_all_ranks(leave)

    def leave_without_a_verdict(status):
        if os.getpid() != this_process:  # a child that the implementation forked
            leave(status)
        all_end(f"ended the process: os._exit({status})", traceback.extract_stack()[:-1])

    def late():
        all_end(f"did not return within {timeout:g} s ({option})", traceback.extract_stack(sys._current_frames()[main]))

    # also ends code that holds the GIL, so that no other thread of Python runs
    faulthandler.dump_traceback_later(timeout + 2 * TOGETHER_S, exit=True, file=STDERR)
    os._exit = leave_without_a_verdict
    try:
        with _timer(timeout, late):
            yield
    except Exception as error:  # the other ranks wait for this one
        if isinstance(error, UnavailableError if case and progress.call == "make" else () if case else EPError):
            raise
        all_end(f"raised {type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__))
    finally:
        os._exit = leave
        faulthandler.cancel_dump_traceback_later()


def _end_all_ranks(leave):
    """End the processes of all ranks with status 1.

    MPI_Abort gives mpirun this status. After a rank's exit MPICH would combine it with the 9 of ranks that it kills.
    """
    faulthandler.dump_traceback_later(TOGETHER_S, exit=True, file=STDERR)  # if MPI_Abort does not return
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)
    leave(1)
