"""`python -m epmoe check [NAME ...]`: runs every case on implementations and says what differs from the reference.

Without a name on this project's kernels: split, fused, rows, HybridEP; under mpirun with one rank a process.
Exit codes: 0 equal to the reference, 1 differs, 2 cannot be run (no such implementation, a library is missing).
"""

import json
import sys

from epmoe_ref.errors import EPError, EPValueError

EQUAL, DIFFERS, CANNOT_RUN = 0, 1, 2
NO_CASE = -1


def add_arguments(parser):
    """The sub-command's arguments, put into an argparse parser."""
    from epmoe.check.adapters import ADAPTERS
    parser.add_argument("implementations", nargs="*", metavar="implementation",
                        help="module:Class, found from the current folder, or one of " + ", ".join(ADAPTERS)
                             + "; none: this project's kernels")
    parser.add_argument("--ranks", type=int, default=4, help="size of the world (default 4; with one rank a process, "
                                                            "the number of processes)")
    parser.add_argument("--only", metavar="TEXT", help="run only the cases whose name contains TEXT")
    said = parser.add_mutually_exclusive_group()
    said.add_argument("--quiet", action="store_true", help="print only what differs, and the verdict")
    said.add_argument("--json", action="store_true",
                      help="one JSON object instead of lines: each case, and each difference with its place")


def run(arguments):
    """Runs the check, prints from the first rank, and returns the exit code, the same on every rank."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    names = arguments.implementations or own()
    from epmoe.check.ranks import process_number

    said, records = set(), []
    try:
        _compile_first(names, arguments)
        codes = [_check(name, arguments, said, records) for name in names]
        if NO_CASE in codes and set(codes) <= {NO_CASE, CANNOT_RUN}:
            if process_number() == 0:
                _complain(_no_case(names, arguments), said)
    except EPError as error:
        _complain(error, said)
        return CANNOT_RUN
    # the names are those of another layout's cases, if some implementation had any
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
    from epmoe.check.conformance import all_cases
    from epmoe.check.implementation import load

    there = dict.fromkeys(case.name for name in names for case, *_ in all_cases(load(name), max(1, arguments.ranks)))
    return f"no case's name contains {arguments.only!r}; there are: {', '.join(there)}"


def own():
    """The names of this project's kernels."""
    from epmoe.check.adapters import OWN
    from epmoe.check.ranks import started_by_mpirun
    return [f"mpi_{name}" if started_by_mpirun() else name for name in OWN]


def _compile_first(names, arguments):
    """Kernels of this project, which on GPUs would otherwise be compiled one after another."""
    from epmoe.check.adapters import OWN
    from epmoe.check.ranks import started_by_mpirun
    prefix = "mpi_" if started_by_mpirun() else ""
    ours = [f"mpi_{name}" for name in OWN if prefix + name in names]
    if ours:
        from epmoe.check.compiled_first import compile_all
        compile_all(ours, arguments.only or "", None if prefix else arguments.ranks)


def _check(name, arguments, said, records):
    from epmoe.check.conformance import check
    from epmoe.check.implementation import load
    from epmoe.check.ranks import ranks_of, started_with_others
    try:
        implementation = load(name)
        if started_with_others() and not implementation.per_rank:
            raise EPValueError(f"{name} has the whole world in one process (per_rank is False), and several were "
                               "started, of which each would do the same: start it alone, or set per_rank = True")
        ranks = ranks_of(implementation, arguments.ranks)
        is_first, first_with = 0 in ranks.here, {}

        def tell(outcome):
            if is_first and not arguments.json and (outcome.differences or not arguments.quiet):
                same = first_with.setdefault(outcome.differences, outcome.case) if outcome.differences else outcome.case
                print(outcome if same == outcome.case else f"DIFFERS     {outcome.case}: as in {same!r}", flush=True)

        report = check(implementation, ranks=ranks, only=arguments.only or "", name=name, tell=tell)
    except EPError as error:
        _complain(error, said)
        records.append({"name": name, "passed": False, "verdict": f"cannot be run: {error}", "cases": []})
        return CANNOT_RUN
    if not report.outcomes:
        ranks.close()
        return NO_CASE
    records.append(report.record())
    if is_first and not arguments.json:
        print(report.verdict, flush=True)
    ranks.close()
    return EQUAL if report.passed else DIFFERS
