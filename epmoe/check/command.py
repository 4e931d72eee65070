"""`python -m epmoe check [NAME ...]`: runs every case on implementations and says what differs from the reference.

Without a name on this project's kernels: split, fused, rows, HybridEP; under mpirun with one rank a process.
Exit codes: 0 equal to the reference, 1 differs, 2 cannot be run (no such implementation, a library is missing).
"""

import sys

from epmoe_ref.errors import EPError

EQUAL, DIFFERS, CANNOT_RUN = 0, 1, 2


def add_arguments(parser):
    """The sub-command's arguments, put into an argparse parser."""
    from epmoe.check.adapters import ADAPTERS
    parser.add_argument("implementations", nargs="*", metavar="implementation",
                        help="module:Class, found from the current folder, or one of " + ", ".join(ADAPTERS)
                             + "; none: this project's kernels")
    parser.add_argument("--ranks", type=int, default=4, help="size of the world (default 4; with one rank a process, "
                                                            "the number of processes)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases whose name contains TEXT")
    parser.add_argument("--quiet", action="store_true", help="print only what differs, and the verdict")


def run(arguments):
    """Runs the check, prints from the first rank, and returns the exit code, the same on every rank."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    names = arguments.implementations or own()
    try:
        _compile_first(names, arguments)
    except EPError as error:
        print(f"epmoe check: {error}", file=sys.stderr)
        return CANNOT_RUN
    return max(_check(name, arguments) for name in names)


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
        compile_all(ours, arguments.only, None if prefix else arguments.ranks)


def _check(name, arguments):
    from epmoe.check.conformance import check
    from epmoe.check.implementation import load
    from epmoe.check.ranks import ranks_of
    try:
        implementation = load(name)
        ranks = ranks_of(implementation, arguments.ranks)
        is_first = 0 in ranks.here

        def tell(outcome):
            if is_first and (outcome.differences or not arguments.quiet):
                print(outcome, flush=True)

        report = check(implementation, ranks=ranks, only=arguments.only, name=name, tell=tell)
    except EPError as error:
        print(f"epmoe check: {error}", file=sys.stderr)
        return CANNOT_RUN
    if not report.outcomes:
        if len(arguments.implementations) == 1:
            print(f"epmoe check: no case's name contains {arguments.only!r}", file=sys.stderr)
            return CANNOT_RUN
        return EQUAL            # the names are those of another layout's cases
    if is_first:
        print(report.verdict, flush=True)
    ranks.close()
    return EQUAL if report.passed else DIFFERS
