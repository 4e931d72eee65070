"""Commands of a program, each a module with add_arguments(parser) and run(arguments) -> exit status; shared options."""

import argparse
import os
import sys
from importlib import import_module

CANNOT_RUN = 2
CUT_SHORT = 141         # what a shell says of a program whose reader went away


def at_least_one(text):
    """An option's number, from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def sizes_of_a_world(parser):
    """The options for the sizes of an EPConfig, as a group of a command's options."""
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--ranks", type=at_least_one,
                       help="virtual ranks (default 4; under mpirun as many as it started)")
    sizes.add_argument("--experts-per-rank", type=int, default=4, metavar="N", help="experts of each rank (default 4)")
    sizes.add_argument("--experts", type=int, metavar="N", help="experts in all, instead of --experts-per-rank")
    sizes.add_argument("--top-k", type=int, default=4, help="experts a token chooses (default 4)")
    sizes.add_argument("--hidden", type=int, default=256, help="elements of a token (default 256)")
    sizes.add_argument("--tokens", type=int, default=16, help="most tokens of a rank (default 16)")
    return sizes


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
