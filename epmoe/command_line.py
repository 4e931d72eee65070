"""Commands of a program, each a module with add_arguments(parser) and run(arguments) -> exit status; shared options."""

import argparse
import math
import os
import sys
from importlib import import_module

from epmoe_ref.errors import EPValueError

CANNOT_RUN = 2
CUT_SHORT = 141         # what a shell says of a program whose reader went away
INTERRUPTED = 130       # and of one that was stopped by Ctrl-C


def at_least_one(text):
    """An option's number, from 1 on."""
    return _whole(text, 1)


def at_least_zero(text):
    """An option's number, from 0 on: a seed."""
    return _whole(text, 0)


def part_of_all(text):
    """An option's I/N as (I, N): the Ith of N parts, from 1 on."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N with 1 <= I <= N, for instance 1/4")
    return int(number), int(of)


def positive_seconds(text):
    """An option's time, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of seconds, for instance 30")
    return value


def _whole(text, least):
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
    return value


def sizes_of_a_world(parser, *, ranks=4, experts_per_rank=4, top_k=4, hidden=256, tokens=16):
    """The options for the sizes of an EPConfig, with these defaults, as a group of a command's options.

    hidden: a number, or in words what --hidden is when it is left out, which then is None.
    """
    sizes = parser.add_argument_group("sizes")
    for name, default, what in (
            ("ranks", None, f"virtual ranks (default {ranks}; under mpirun as many as it started)"),
            ("experts-per-rank", experts_per_rank, "experts of each rank (default %(default)s)"),
            ("experts", None, "experts in all, instead of --experts-per-rank"),
            ("top-k", top_k, "experts a token chooses (default %(default)s)"),
            ("hidden", hidden if isinstance(hidden, int) else None, f"elements of a token (default {hidden})"),
            ("tokens", tokens, "most tokens of a rank (default %(default)s)")):
        sizes.add_argument(f"--{name}", type=at_least_one, default=default, metavar="N", help=what)
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
        # no abbreviations: what is misspelt, or was another command's, should not be taken for something else
        parser = parsers.add_parser(name, help=what, description=what, allow_abbrev=False)
        if name == argv[0]:
            import_module(module).add_arguments(parser)
    arguments = top.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):      # a terminal or pipe of another encoding shows ? for lines and boxes
        sys.stdout.reconfigure(errors="replace")
    try:
        status = import_module(commands[arguments.command][0]).run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:         # the reader has seen enough: `| head`, a pager left early
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)        # what the interpreter flushes at its end
        return CUT_SHORT
    except EPValueError as error:
        print(f"{prog} {arguments.command}: {error}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        print(f"{prog} {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{prog} {arguments.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return CANNOT_RUN
