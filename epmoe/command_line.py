"""Commands of a program, each a module with add_arguments(parser) and run(arguments) -> exit status."""

import argparse
import os
import sys
from importlib import import_module

CANNOT_RUN = 2
CUT_SHORT = 141         # what a shell says of a program whose reader went away


def main(prog, description, commands, default, argv=None):
    """Run the command that argv (sys.argv without the program) begins with, or the default one: its exit status.

    commands: {name: (module, what it does)}; only the module of the chosen command is imported.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = [default, *argv]
    top = argparse.ArgumentParser(
        prog=prog, description=f"{description} Without a command: {default}, whose options `{default} --help` shows.")
    parsers = top.add_subparsers(dest="command", metavar="command")
    for name, (module, what) in commands.items():
        parser = parsers.add_parser(name, help=what, description=what)
        if name == argv[0]:
            import_module(module).add_arguments(parser)
    arguments = top.parse_args(argv)
    try:
        status = import_module(commands[arguments.command][0]).run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:         # the reader has seen enough: `| head`, a pager left early
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)        # what the interpreter flushes at its end
        return CUT_SHORT
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{prog} {arguments.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return CANNOT_RUN
