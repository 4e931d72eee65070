"""`python -m epmoe check NAME`: runs every case on an implementation and says what differs from the reference.

Exit codes: 0 equal to the reference, 1 differs, 2 cannot be run (no such implementation, a library is missing).
"""

import sys

from epmoe_ref.errors import EPError

EQUAL, DIFFERS, CANNOT_RUN = 0, 1, 2


def add_arguments(parser):
    """The sub-command's arguments, put into an argparse parser."""
    from epmoe.check.adapters import ADAPTERS
    parser.add_argument("implementation", help="module:Class, found from the current folder, or one of "
                                               + ", ".join(ADAPTERS))
    parser.add_argument("--ranks", type=int, default=4, help="size of the world (default 4; with one rank a process, "
                                                            "the number of processes)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases whose name contains TEXT")
    parser.add_argument("--quiet", action="store_true", help="print only what differs, and the verdict")


def run(arguments):
    """Runs the check, prints from the first rank, and returns the exit code, the same on every rank."""
    from epmoe.check.conformance import check
    from epmoe.check.implementation import load
    from epmoe.check.ranks import ranks_of
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        implementation = load(arguments.implementation)
        ranks = ranks_of(implementation, arguments.ranks)
        is_first = 0 in ranks.here

        def tell(outcome):
            if is_first and (outcome.differences or not arguments.quiet):
                print(outcome, flush=True)

        report = check(implementation, ranks=ranks, only=arguments.only, name=arguments.implementation, tell=tell)
    except EPError as error:
        print(f"epmoe check: {error}", file=sys.stderr)
        return CANNOT_RUN
    if not report.outcomes:
        print(f"epmoe check: no case's name contains {arguments.only!r}", file=sys.stderr)
        return CANNOT_RUN
    if is_first:
        print(report.verdict, flush=True)
    ranks.close()
    return EQUAL if report.passed else DIFFERS
