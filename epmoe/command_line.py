"""Runs commands: modules with add_arguments(parser) and run(arguments) -> exit status. Also defines shared options.

Exit status of every command: 0 if everything agrees, 1 if something differs, 2 if it cannot run (nothing was compared,
bad options, a missing file or library, an unexpected error), 130 after Ctrl-C, 141 if the output was closed.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from shlex import quote

from epmoe import __version__
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

EQUAL, DIFFERS, CANNOT_RUN = 0, 1, 2
CUT_SHORT = 141  # a shell's status for a program whose output was closed
INTERRUPTED = 130  # a shell's status for a program stopped by Ctrl-C
CLOSE = 0.75  # similarity of names that are suggested, as difflib counts it
MOST_SECONDS = 1e9  # 31 years
OPTION_OF = {
    "n_ranks": "--ranks",
    "n_experts": "--experts",
    "top_k": "--top-k",
    "hidden": "--hidden",
    "max_tokens_per_rank": "--tokens",
    "p2p_world_size": "--p2p-world-size",
    "skip_a2a": "--skip-a2a",
    "token_format": "--format",
}


def refuse_to_overwrite(source, **written):
    """Refuse an option, name=(path, ending), that would write over the file which the command reads, or over a file
    with another ending. Both paths may be None."""
    for name, (path, ending) in written.items():
        if not path or not os.path.isfile(path):
            continue
        if source and os.path.exists(source) and os.path.samefile(source, path):
            raise EPValueError(f"--{name} {path} is the file that is read, and would be overwritten: name another one")
        if not path.endswith(ending):
            raise EPValueError(f"--{name} {path} exists and does not end in {ending}: name another file")


def new_file(file):
    """The Path of an answer for --start to write; EPValueError if something is there already."""
    if Path(file).exists():
        other = quote(file.removesuffix(".py") + "_2.py")
        raise EPValueError(f"{file} exists and is left alone: give another name, --start {other}")
    return Path(file)


def at_least_one(text):
    """An option's whole number, at least 1."""
    return _whole(text, 1)


def at_least_zero(text):
    """An option's whole number, at least 0, such as a seed."""
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
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a positive number of seconds, for instance 30, and at most {MOST_SECONDS:g}"
        )
    return value


def _whole(text, least):
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
    return value


def number_of_one(parser, files, what):
    """The argument of a command that tells one of these numbered files; without it the command lists what there is."""

    def number(word):
        if word not in map(str, files):
            raise argparse.ArgumentTypeError(f"{word} is none of the {what}: N is 1 to {max(files)}")
        return int(word)

    parser.add_argument(
        "number", nargs="?", type=number, metavar="N", help=f"1 to {max(files)}; without it the {what} are listed"
    )


def sizes_of_a_world(parser, *, ranks=4, experts_per_rank=4, top_k=4, hidden=256, tokens=16):
    """The options for the sizes of an EPConfig, with these defaults, as a group of a command's options.

    hidden: the default of --hidden, or a description of it; the option is then None by default.
    """
    sizes = parser.add_argument_group("sizes")
    experts = sizes.add_mutually_exclusive_group()
    for name, default, what in (
        ("ranks", None, f"virtual ranks (default {ranks}; under mpirun as many as it started)"),
        # as a word, which argparse tells from a number that was given
        ("experts-per-rank", str(experts_per_rank), "experts of each rank (default %(default)s)"),
        ("experts", None, "number of experts, instead of --experts-per-rank"),
        ("top-k", top_k, "experts a token chooses (default %(default)s)"),
        ("hidden", hidden if isinstance(hidden, int) else None, f"elements of a token (default {hidden})"),
        ("tokens", tokens, "the most tokens of a rank (default %(default)s)"),
    ):
        group = experts if name.startswith("experts") else sizes
        group.add_argument(f"--{name}", type=at_least_one, default=default, metavar="N", help=what)
    return sizes


def kernels_and_world(options):
    """Add to a group of a command's options: which kernels run, where the ranks are, and when a wait gives up."""
    options.add_argument(
        "--kernels",
        choices=("plain", "fast"),
        help="plain: as in the specification; fast: tuned "
        "(default: fast on GPUs of compute capability 9.0 and newer, plain elsewhere)",
    )
    options.add_argument(
        "--world",
        choices=("auto", "local", "mpi"),
        default="auto",
        help="all ranks in this process, or one rank a process (default: what mpirun suggests)",
    )
    options.add_argument(
        "--p2p-world-size",
        type=at_least_one,
        metavar="N",
        help="make p2p worlds of N ranks, with SHMEM between them (default: one p2p world)",
    )
    options.add_argument(
        "--timeout", type=positive_seconds, default=30.0, metavar="S", help="seconds until a wait gives up"
    )


def _not_empty(word):
    if not word.strip():
        raise argparse.ArgumentTypeError("is empty: give a value, or leave it out (is a shell variable unset?)")
    return word


class Parser(argparse.ArgumentParser):
    """argparse with errors that suggest the nearest name and show the command's usage; refuses empty arguments.

    Options cannot be abbreviated, so that a misspelt one is not mistaken for another.
    """

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        self.register("type", None, _not_empty)  # for arguments without a type

    def parse_args(self, args=None, namespace=None):
        """The options; SystemExit 2 with usage and a suggestion for an unknown one."""
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def option_names(self):
        """The names of all options."""
        return re.findall(r"--[\w-]+", self.format_usage())

    def error(self, message):
        """Print usage, the error, and the nearest name; exit with 2."""
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: )['\"]?([^\s'\"=]+)", message)
        there = (
            self.option_names()
            if wrong and wrong[1].startswith("-")
            else re.findall(r"[\w.-]+", message.partition("choose from")[2])
        )
        guess = wrong and not wrong[1].isdecimal()  # no number resembles another
        longer = [name for name in there if guess and name.startswith(wrong[1])]
        near = longer if len(longer) == 1 else difflib.get_close_matches(wrong[1], there, 1, CLOSE) if guess else ()
        super().error(message + "".join(f"; did you mean {name}?" for name in near))


def main(prog, description, commands, default, argv=None):
    """Run the command that argv (sys.argv without the program) begins with, or the default; returns its exit status.

    commands: {name: (module, description)}; only the module of the chosen command is imported.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
        argv = [default, *argv]
    name, *words = argv
    if name not in commands:
        _top_parser(prog, description, commands, default).parse_args([name])
    _usable_streams()
    arguments = None
    try:
        parser = Parser(prog=f"{prog} {name}", description=commands[name][1])
        module = import_module(commands[name][0])
        module.add_arguments(parser)
        arguments = parser.parse_args(words)
        status = module.run(arguments)
        sys.stdout.flush()
        return status
    except (BrokenPipeError, SystemExit) as error:  # rich turns a closed output into a SystemExit
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        return CUT_SHORT  # the reader closed the output: `| head`, a pager
    except KeyboardInterrupt:
        print(f"{prog} {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # not Python's status 1, which here means that something differs
        if not isinstance(error, (EPValueError, UnavailableError, OSError, MemoryError)):
            traceback.print_exc()
        told = f"{_rank()}{_told(error, parser.option_names())}"
        sys.stderr.write(f"{prog} {name}: {told}\n")  # in one piece: other ranks may write too
        if getattr(arguments, "json", "--json" in words) is True and _rank() in ("", "rank 0: "):
            with contextlib.suppress(OSError):
                print(json.dumps({"passed": False, "cannot_run": told}))
        return CANNOT_RUN
    finally:
        _forget_what_cannot_be_written()


def _told(error, there):
    """Why a command cannot run, in one line; names those of its options (`there`) that are for fields of an EPConfig."""
    if isinstance(error, OSError):
        return f"{'' if error.filename is None else f'{error.filename}: '}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return f"not enough memory: choose smaller sizes ({error or 'MemoryError'})"
    if not isinstance(error, EPError):
        return "this is a fault of the program, not a difference; please report it"
    text = str(error)
    if {"--p2p-world-size", "--skip-a2a"} <= set(there):
        text = re.sub(r"set use_shmem=True \(or skip_a2a=True.*", "add --p2p-world-size 8, or --skip-a2a", text)
    options = {OPTION_OF[word] for word in re.findall(r"\w+", text) if OPTION_OF.get(word) in there}
    unnamed = ", ".join(sorted(option for option in options if option not in text))
    return f"{text} (see {unnamed})" if unnamed else text


def _rank():
    from epmoe.check.ranks import process_number, started_with_others

    return f"rank {process_number()}: " if started_with_others() else ""


def _top_parser(prog, description, commands, default):
    top = Parser(
        prog=prog, description=f"{description} Without a command: {default}, whose options `{default} --help` shows."
    )
    top.add_argument("--version", action="version", version=f"epmoe {__version__}")
    parsers = top.add_subparsers(dest="command", metavar="command", parser_class=argparse.ArgumentParser)
    for name, (_, what) in commands.items():
        parsers.add_parser(name, help=what)
    return top


def _usable_streams():
    """Drop output to closed streams; show ? for characters that the terminal's encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _forget_what_cannot_be_written():
    """Drop the rest of stdout's buffer if it cannot be written; the interpreter's last flush would exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
