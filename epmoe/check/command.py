"""`epmoe check [NAME ...]`: runs every case on implementations and reports differences from the reference.

Without a name it checks this project's kernels: split, fused, rows, HybridEP; under mpirun with one rank a process.
Each implementation runs in a separate process, so that one that hangs, crashes or exits gets a verdict too. With one
rank a process it runs in that process. Exit codes: as in epmoe.command_line.
"""

import json
import os
import shlex
import sys
import threading
import traceback

from epmoe.check import guarded
from epmoe.check.adapters import ADAPTERS, OWN
from epmoe.check.calls import progress
from epmoe.check.conformance import Report, all_cases, check
from epmoe.check.implementation import load
from epmoe.check.ranks import process_number, ranks_of, started_as_rank, started_by_mpirun, started_with_others
from epmoe.command_line import CANNOT_RUN, DIFFERS, EQUAL, at_least_one, positive_seconds
from epmoe_ref.errors import EPError, EPValueError

NO_CASE = -1
TIMEOUT_S = 120.0
FRAMES = 8  # of the stack of a call that hangs
STDERR = 2  # an implementation prints here while stdout holds JSON


def add_arguments(parser):
    """Add the sub-command's arguments to an argparse parser."""
    what = f"module:Class, found from the current folder, or one of {', '.join(ADAPTERS)}; none: this project's kernels"
    parser.add_argument("implementations", nargs="*", metavar="implementation", help=what)
    parser.add_argument(
        "--ranks",
        type=at_least_one,
        default=4,
        metavar="N",
        help="size of the world (default 4; with one rank a process, the number of processes)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="run only the case of this name, else the cases whose name contains TEXT"
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=TIMEOUT_S,
        metavar="S",
        help="seconds after which a case counts as hung (default %(default)g)",
    )
    said = parser.add_mutually_exclusive_group()
    said.add_argument("--quiet", action="store_true", help="print only what differs, and the verdict")
    said.add_argument(
        "--json",
        action="store_true",
        help="one JSON object instead of lines: each case, and each difference with its place",
    )


def run(arguments):
    """Run the check and print from the first rank. Returns the exit code, the same on every rank."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    arguments.only = arguments.only or ""
    names = arguments.implementations or own()
    said, records = set(), []
    try:
        if started_as_rank():
            compile_first(names, arguments.only, arguments.ranks)
        codes = [_check(name, arguments, said, records) for name in names]
        if NO_CASE in codes and set(codes) <= {NO_CASE, CANNOT_RUN}:
            if process_number() == 0:
                _complain(_no_case(names, arguments), said)
    except EPError as error:
        _complain(error, said)
        return CANNOT_RUN
    # another implementation has a layout that has cases with these names
    code = max((code for code in codes if code != NO_CASE), default=CANNOT_RUN)
    if arguments.json and process_number() == 0:
        print(json.dumps({"passed": code == EQUAL, "implementations": records}, indent=1, default=int))
    return code


def _complain(message, said):
    """Print a message once, in one piece."""
    text = f"epmoe check: {message}\n"
    if text not in said:
        sys.stderr.write(text)
    said.add(text)


def _no_case(names, arguments):
    there = dict.fromkeys(case.name for name in names for case, *_ in all_cases(load(name), arguments.ranks))
    return f"no case's name contains {arguments.only!r}; there are: {', '.join(there)}"


def own():
    """The names of this project's kernels."""
    return [f"mpi_{name}" if started_by_mpirun() else name for name in OWN]


def compile_first(names, only, n_ranks):
    """Compile this project's kernels in parallel. Otherwise GPUs would wait for them one after another."""
    prefix = "mpi_" if started_by_mpirun() else ""
    ours = [f"mpi_{name}" for name in OWN if prefix + name in names]
    if ours:
        from epmoe.check.compiled_first import compile_all

        compile_all(ours, only, None if prefix else n_ranks)


def _check(name, arguments, said, records):
    """The exit code for one implementation. Prints its outcomes and verdict."""
    prints, first_with = process_number() == 0 and not arguments.json, {}

    def tell(outcome):
        if prints and (outcome.differences or not arguments.quiet):
            same = first_with.setdefault(outcome.differences, outcome.case) if outcome.differences else outcome.case
            text = outcome if same == outcome.case else f"DIFFERS     {outcome.case}: as in {same!r}"
            if same == outcome.case and outcome.differences and not started_as_rank():
                only = shlex.quote(outcome.case)
                text = f"{text}\n  again: epmoe check {name} --only {only} --ranks {arguments.ranks}"
            print(text, flush=True)

    try:
        if started_as_rank():
            report = _as_rank(name, arguments, tell)
        else:
            report, output = Report(name, arguments.ranks), STDERR if arguments.json else None
            for outcome in guarded.outcomes(report, arguments.only, arguments.timeout, output):
                tell(outcome)
    except EPError as error:
        _complain(error, said)
        records.append({"name": name, "passed": False, "verdict": f"cannot be run: {error}", "cases": []})
        return CANNOT_RUN
    if not report.outcomes:
        return NO_CASE
    records.append(report.record())
    if prints:
        print(report.verdict, flush=True)
    return EQUAL if report.passed else DIFFERS if report.run else CANNOT_RUN


def _as_rank(name, arguments, tell):
    """The Report of an implementation with one rank a process, run on this rank. A hang or an error ends all ranks."""
    leave, this_process = os._exit, os.getpid()

    def all_end(why):
        sys.stderr.write(f"epmoe check: {name}: rank {process_number()}: {why}; all ranks end\n")
        sys.stderr.flush()
        leave(DIFFERS)

    def leave_without_a_verdict(status):
        if os.getpid() != this_process:  # a child that the implementation forked
            leave(status)
        all_end(f"differs: it ended the process: os._exit({status})")

    os._exit = leave_without_a_verdict
    try:
        return _checked_as_rank(name, arguments, tell, all_end)
    except EPError:
        raise
    except Exception as error:  # the other ranks wait for this one, so the launcher must end all
        traceback.print_exc()
        all_end(f"differs: {progress} raised {type(error).__name__}: {error}")
    finally:
        os._exit = leave


def _checked_as_rank(name, arguments, tell, all_end):
    implementation = load(name)
    if started_with_others() and not implementation.per_rank:
        raise EPValueError(
            f"{name} has the whole world in one process (per_rank is False), and several were "
            "started, which would all do the same: start it alone, or set per_rank = True"
        )
    ranks, timers = ranks_of(implementation, arguments.ranks, name), []

    def give_up(case):
        traceback.print_stack(sys._current_frames()[threading.main_thread().ident], -FRAMES)
        all_end(f"case {case!r}: {progress} did not return within {arguments.timeout:g} s (--timeout)")

    def begin(case):
        end()
        timers.append(threading.Timer(arguments.timeout, give_up, [case]))
        timers[-1].daemon = True
        timers[-1].start()

    def end():
        while timers:
            timers.pop().cancel()

    try:
        report = check(implementation, ranks=ranks, only=arguments.only, name=name, tell=tell, begin=begin)
    finally:
        end()
    ranks.close()  # not after an exception: it may wait for the other ranks
    return report
