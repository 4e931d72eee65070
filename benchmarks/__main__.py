"""Command line: python -m benchmarks [options], python -m benchmarks figure FILE, python -m benchmarks cpu."""

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "run": ("benchmarks.run", "dispatch and combine against the floor and other libraries (the default)"),
    "figure": ("benchmarks.figure", "time against tokens, out of files of results"),
    "cpu": ("benchmarks.cpu", "the reference against memcpy, and how fast the simulator is"),
}


def main(argv=None):
    """Run a command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or (argv[0] not in COMMANDS and argv[0] not in ("-h", "--help")):
        argv = ["run", *argv]
    top = argparse.ArgumentParser(prog="python -m benchmarks", description="Without a command: run, whose options "
                                  "`run --help` shows.")
    commands = top.add_subparsers(dest="command", metavar="command")
    for name, (module, what) in COMMANDS.items():
        parser = commands.add_parser(name, help=what, description=what)
        if name == argv[0]:
            import_module(module).add_arguments(parser)
    arguments = top.parse_args(argv)
    return import_module(COMMANDS[arguments.command][0]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
