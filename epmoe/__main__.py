"""Command line: python -m epmoe [verify | doctor] [options]; without a command it verifies."""

import argparse
import sys


def parser():
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m epmoe", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="command")
    from epmoe import verify

    verify.add_arguments(commands.add_parser("verify", help="kernels against the reference, with pictures (the default)"))
    doctor = commands.add_parser("doctor", help="what this machine can do, and the remedy for what is missing")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return top


def main(argv=None):
    """Run a command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = parser()
    commands = next(a.choices for a in top._actions if isinstance(a, argparse._SubParsersAction))
    if not argv or (argv[0] not in commands and argv[0] not in ("-h", "--help")):
        argv = ["verify", *argv]
    args = top.parse_args(argv)
    if args.command == "doctor":
        from epmoe import doctor

        return doctor.report(args.json)
    from epmoe import verify

    return verify.main(args)


if __name__ == "__main__":
    sys.exit(main())
