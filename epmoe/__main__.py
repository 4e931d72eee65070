"""Command line: python -m epmoe [command] [options]. Without a command it verifies."""

import argparse
import sys
from importlib import import_module

# command -> (the module with add_arguments(parser) and run(arguments) -> exit status, what it does)
COMMANDS = {
    "verify": ("epmoe.verify", "kernels against the reference, with pictures (the default)"),
    "doctor": ("epmoe.doctor", "what this machine can do, and the remedy for what is missing"),
    "check": ("epmoe.check.command", "anybody's implementation against the reference"),
    "vectors": ("epmoe.vectors.command", "golden vectors: inputs and results as files"),
    "mutants": ("epmoe.mutants.command", "each synchronisation of the kernels broken in turn: is it noticed?"),
    "soak": ("epmoe.soak.command", "very many rounds, made and checked on the device"),
}


def main(argv=None):
    """Run a command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or (argv[0] not in COMMANDS and argv[0] not in ("-h", "--help")):
        argv = ["verify", *argv]
    top = argparse.ArgumentParser(prog="python -m epmoe", description="Expert-parallel dispatch and combine. Without a "
                                  "command it verifies; `verify --help` shows the options.")
    commands = top.add_subparsers(dest="command", metavar="command")
    for name, (module, what) in COMMANDS.items():
        parser = commands.add_parser(name, help=what, description=what)
        if name == argv[0]:
            import_module(module).add_arguments(parser)
    arguments = top.parse_args(argv)
    return import_module(COMMANDS[arguments.command][0]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
