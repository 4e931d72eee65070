"""`epmoe check [NAME ...]`: runs every case on implementations and reports differences from the reference.

Without a name it checks this project's kernels: split, fused, rows, HybridEP; under mpirun with one rank a process.
Each implementation runs in a separate process, so that one that hangs, crashes or exits gets a verdict too. With one
rank a process it runs in that process. Exit codes: as in epmoe.command_line.
"""

import faulthandler
import json
import os
import socket
import sys
from difflib import get_close_matches

from epmoe.check import guarded
from epmoe.check.adapters import ADAPTERS, OWN
from epmoe.check.conformance import Outcome, Report, all_cases, check, chosen
from epmoe.check.guarded import STDERR
from epmoe.check.implementation import load, parts_of
from epmoe.check.ranks import (
    N_RANKS,
    WholeWorld,
    launched,
    process_number,
    ranks_of,
    started_as_rank,
    started_by_mpirun,
)
from epmoe.command_line import CANNOT_RUN, CLOSE, DIFFERS, EQUAL, at_least_one, positive_seconds
from epmoe.lessons.telling import for_terminal
from epmoe_ref.errors import EPError, EPValueError

NO_CASE = -1
TIMEOUT_S = 120.0


def add_arguments(parser):
    """Add the sub-command's arguments to an argparse parser."""
    what = f"module:Class, found from the current folder, or one of {', '.join(ADAPTERS)}; none: this project's kernels"
    parser.add_argument("implementations", nargs="*", metavar="implementation", help=what)
    parser.add_argument(
        "--ranks",
        type=at_least_one,
        metavar="N",
        help=f"size of the world (default {N_RANKS}; with one rank a process, the number of processes)",
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
    for name in names:
        parts_of(name)  # before any of them runs
    said, records = set(), []
    try:
        if started_as_rank():
            compile_first(names, arguments.only, arguments.ranks or N_RANKS)
        codes = [_check(number, names, arguments, said, records) for number in range(len(names))]
        if NO_CASE in codes and set(codes) <= {NO_CASE, CANNOT_RUN}:
            if process_number() == 0:
                _complain(_no_case(names, arguments), said)
    except EPError as error:
        _complain(error, said)
        return CANNOT_RUN
    # another implementation has a layout that has cases with these names
    code = max((code for code in codes if code != NO_CASE), default=CANNOT_RUN)
    if arguments.json and process_number() == 0:
        _print_json(code == EQUAL, records)
    return code


def _print_json(passed, records):
    print(json.dumps({"passed": passed, "implementations": records}, indent=1, default=int), flush=True)


def _complain(message, said):
    """Print a message once, in one piece."""
    text = f"epmoe check: {message}\n"
    if text not in said:
        sys.stderr.write(text)
    said.add(text)


def _no_case(names, arguments):
    there = dict.fromkeys(case.name for name in names for case, *_ in all_cases(load(name), arguments.ranks or N_RANKS))
    words = {word: name for name in reversed(there) for word in (name, *name.split())}
    near = "".join(f"; did you mean {words[word]!r}?" for word in get_close_matches(arguments.only, words, 1, CLOSE))
    return "\n  ".join([f"no case's name contains {arguments.only!r}{near or '.'} There are:", *there])


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


def _check(number, names, arguments, said, records):
    """The exit code for one implementation, names[number]. Prints its outcomes and verdict."""
    name, prints, first_with = names[number], process_number() == 0 and not arguments.json, {}

    def begin(n_cases):
        if prints and n_cases and not arguments.quiet:
            of_all = f" ({number + 1} of {len(names)})" if len(names) > 1 else ""
            hint = "" if number or arguments.implementations else "; your own: epmoe check module:Class"
            print(f"checking {name}{of_all}: {n_cases} case{'s' * (n_cases != 1)}{hint}", flush=True)

    def tell(outcome, ranks):
        if prints and (outcome.differences or not arguments.quiet):
            same = first_with.setdefault(outcome.differences, outcome.case) if outcome.differences else outcome.case
            text = outcome if same == outcome.case else f"DIFFERS     {outcome.case}: as in {same!r}"
            if same == outcome.case and outcome.differences:
                text = f"{text}\n  again: {ranks.again(name, outcome.case)}"
            print(for_terminal(text), flush=True)

    try:
        if started_as_rank():
            report = _as_rank(name, arguments, tell, begin, records)
        else:
            ranks, output = WholeWorld(arguments.ranks or N_RANKS), STDERR if arguments.json else None
            report = Report(name, ranks.size)
            for outcome in guarded.outcomes(report, arguments.only, arguments.timeout, output, begin=begin):
                tell(outcome, ranks)
    except EPError as error:
        _complain(error, said)
        records.append({"name": name, "passed": False, "verdict": f"cannot be run: {error}", "cases": []})
        return CANNOT_RUN
    if not report.outcomes:
        return NO_CASE
    records.append(report.record())
    if prints:
        print(for_terminal(report.verdict), flush=True)
    return EQUAL if report.passed else DIFFERS if report.run and report.made else CANNOT_RUN


def _as_rank(name, arguments, tell, begin, records):
    """The Report of an implementation with one rank a process, run on this rank. A hang or an error ends all ranks."""
    so_far = Report(name, 0)

    def guard(case, seconds=arguments.timeout):
        def failed(difference):
            so_far.outcomes.append(Outcome(case, (difference,)))
            if arguments.json and _first_to_fail():
                _print_json(False, [*records, so_far.record()])

        return guarded.as_rank(name, case, seconds, tell=failed)

    def tell_and_keep(outcome):
        so_far.outcomes.append(outcome)
        tell(outcome, ranks)

    faulthandler.enable(STDERR, all_threads=False)  # if it crashes
    with guard(None, max(arguments.timeout, guarded.START_S)):
        implementation = load(name)
        n_processes, by = launched()
        if n_processes > 1 and not implementation.per_rank:
            raise EPValueError(
                f"{name} holds all ranks in one process, but {n_processes} were started ({by}): start it alone, or set "
                "per_rank = True"
            )
        ranks = ranks_of(implementation, arguments.ranks, name)
        so_far.n_ranks = ranks.size
        begin(len(chosen(all_cases(implementation, ranks.size), arguments.only)))
    report = check(implementation, ranks=ranks, only=arguments.only, name=name, tell=tell_and_keep, around=guard)
    ranks.close()  # not after an exception: it may wait for the other ranks
    return report


def _first_to_fail():
    """Whether no other rank on this host has failed before, so that one alone prints JSON. It holds a socket's name."""
    _first_to_fail.holds = socket.socket(socket.AF_UNIX)
    try:
        _first_to_fail.holds.bind(f"\0epmoe check {os.getppid()}")
    except OSError:
        return False
    return True
