"""`epmoe mutants`: removes each synchronisation of the kernels in turn, and checks that a run notices.

It also runs kernels changed by patches, and the unchanged kernels. The unchanged ones must run without a report.
"""

import argparse
import difflib
import os
import random
import sys
import textwrap
import time
from pathlib import Path

from epmoe.command_line import CANNOT_RUN, DIFFERS, EQUAL, INTERRUPTED, at_least_one, at_least_zero, part_of_all
from epmoe.lessons.telling import WIDTH, wrapped
from epmoe.progress import progress
from epmoe_ref.errors import EPValueError, UnavailableError

RANDOM_WORLDS = 40
# what runs instead of mutants -> the options that it has
INSTEAD = {
    "patch": ("seeds", "jobs", "list", "reports", "random", "sample", "part", "only"),
    "as_they_are": ("seeds", "jobs", "list", "random"),
    "faults": ("write",),
    "thresholds": ("jobs",),
}
OF_MUTANTS = ("statements", "sample", "only", "seeds", "jobs", "list", "reports", "part")


def add_arguments(parser):
    """Add the options of mutants."""
    parser.add_argument("--sample", type=at_least_one, metavar="N", help="run only N mutants, always the same ones")
    parser.add_argument(
        "--only",
        metavar="FILE[:LINE]",
        help="run only mutants of a file of epmoe/kernels, of one line, or of a folder (plain/)",
    )
    parser.add_argument(
        "--seeds", type=at_least_one, default=3, metavar="N", help="schedules tried in each world (default 3)"
    )
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=os.cpu_count(),
        metavar="N",
        help="number of processes (default and limit: one for each core)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print every mutant's verdict, not only the survivors' (--patch always does)",
    )
    parser.add_argument("--reports", action="store_true", help="also print the report for each killed mutant")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--statements",
        nargs="?",
        choices=("instead", "also"),
        const="instead",
        help="make other mistakes (statements swapped, waits off by one, resets left out on some "
        "ranks, ...) instead of removing synchronisations, or in addition",
    )
    instead.add_argument(
        "--patch",
        nargs="+",
        metavar="FILE",
        help="instead: apply each of these unified diffs (`git diff`) to epmoe/kernels, and run it in all worlds",
    )
    instead.add_argument(
        "--as-they-are",
        action="store_true",
        help="instead: run the unchanged kernels in all worlds; nothing may be reported",
    )
    instead.add_argument(
        "--faults", action="store_true", help="instead: show four faults of public kernels, and the reports"
    )
    instead.add_argument(
        "--thresholds",
        action="store_true",
        help="instead: run all worlds, and print which are below, at and above each threshold of the kernels",
    )
    parser.add_argument(
        "--random",
        type=at_least_zero,
        metavar="N",
        help=f"with --patch and --as-they-are: also run N random worlds, one schedule each (default {RANDOM_WORLDS})",
    )
    parser.add_argument("--part", type=part_of_all, metavar="I/N", help="run part I of N of the mutants")
    parser.add_argument("--write", action="store_true", help="with --faults: write README.md of epmoe/mutants")


def run(args):
    """Run the mutants. Exit status: 0 if exactly the harmless ones survive, 1 if not, 2 if they cannot be run.

    After Ctrl-C it prints the verdicts so far and returns 130.
    """
    from rich.console import Console

    from epmoe import device
    from epmoe.mutants import hunt
    from epmoe.mutants.verdicts import Verdicts

    console = Console(highlight=False, soft_wrap=True)  # no line breaks inside file:line
    refuse_what_would_be_ignored(args)
    args.random = RANDOM_WORLDS if args.random is None else args.random
    if not device.SIM:
        raise UnavailableError("races are seen in the simulator only, and a GPU is used: set EPMOE_DEVICE=sim")
    args.jobs = min(args.jobs, os.cpu_count())  # more would only compete for cores
    if args.thresholds:
        return show_thresholds(args, console)
    if args.faults:
        return write_faults(console) if args.write else show_faults(console)
    if args.only:
        _refuse_no_such_file(args.only)
    if args.as_they_are:
        return show_as_they_are(args, console)
    start = time.perf_counter()
    verdicts = Verdicts(console, every=args.list or bool(args.patch), reports=args.reports)
    tokens = [] if args.statements == "instead" else read_patches(args) or hunt.all_mutants()
    mutants = None if args.statements else choose(args, tokens)
    try:
        with hunt.pool(args.jobs) as workers:
            if args.statements:
                statements = hunt.statements_in_files() + hunt.statements_in_pairs(workers, args.only or "")
                mutants = choose(args, tokens + statements)
            undecided = _hunt_with_progress(args, console, workers, mutants, verdicts)
    except EPValueError:
        raise
    except tuple(hunt.KILLS) as error:
        print(f"epmoe mutants: the unedited kernels fail (--as-they-are shows where): {error}", file=sys.stderr)
        return CANNOT_RUN
    unexpected = verdicts.end(undecided, args.seeds, time.perf_counter() - start)
    return INTERRUPTED if undecided else DIFFERS if unexpected else EQUAL


def refuse_what_would_be_ignored(args):
    """Refuse options without effect."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [n for n, default in vars(parser.parse_args([])).items() if getattr(args, n) != default]
    instead = next((name for name in INSTEAD if name in given), None)
    allowed = INSTEAD.get(instead, OF_MUTANTS)
    wrong = [f"--{name}" for name in given if name not in allowed and name != instead]
    if wrong:
        of = {"--write": "--faults", "--random": "--patch or --as-they-are"}.get(wrong[0])
        rule = f"with --{instead.replace('_', '-')}" if instead else f"without {of}"
        raise EPValueError(f"{', '.join(wrong)}: no meaning {rule}: leave it out")


def read_patches(args):
    """The edits in the --patch files. EPValueError if one cannot be read or applied."""
    from epmoe.mutants.patches import edit_of

    if args.patch and args.only:
        raise EPValueError(f"--only {args.only} chooses among mutants made of the source: leave it out with --patch")
    texts = [(name, Path(name).read_text(errors="surrogateescape")) for name in args.patch or ()]
    return [edit_of(name, text) for name, text in texts]


def _refuse_no_such_file(only):
    """Refuse an --only that names no file of the kernels, before anything runs."""
    from epmoe.mutants import edited_kernels

    file = only.partition(":")[0]
    there = edited_kernels.files()
    if not any(_is_in(name, file) for name in there):
        near = difflib.get_close_matches(file, there, 1)
        raise EPValueError(
            f"--only {only}: no file {file} in epmoe/kernels"
            + (f"; did you mean {near[0]}?" if near else ", for instance wait.py, formats/row_copy.py")
        )


def _is_in(name, file):
    """Whether a source is the file, named with or without .py, or lies in that folder, named with a slash."""
    return name in (file, f"{file}.py") or file.endswith("/") and name.startswith(file)


def choose(args, mutants):
    """The mutants that the options select."""
    if args.only:
        file, _, line = args.only.partition(":")
        mutants = [m for m in mutants if _is_in(m.token.file, file) if line in ("", str(m.token.line))]
        if not mutants:
            raise EPValueError(
                f"--only {args.only}: no mutant there; give a folder or a file of "
                "epmoe/kernels (plain/, formats/row_copy.py), and the line of a token or none"
            )
    if args.sample and args.sample < len(mutants):
        mutants = random.Random(0).sample(mutants, args.sample)
    if args.part:
        number, of = args.part
        mutants = mutants[number - 1 :: of]
    if not mutants:
        raise EPValueError(f"--part {number}/{of}: no mutant is in this part, so nothing would be tried")
    return mutants


def _hunt_with_progress(args, console, workers, chosen, verdicts):
    """Run the mutants until all have a verdict. Ctrl-C ends it; `verdicts` then holds those so far."""
    from epmoe.mutants import hunt, random_worlds
    from epmoe.mutants.pieces import hunt_of, hunt_of_edits
    from epmoe.mutants.worlds import WORLDS

    files = {file for m in chosen for file in (m.lines if args.patch else [m.token.file])}
    names = [*WORLDS, *random_worlds.names(args.random)] if args.patch else WORLDS
    worlds = hunt.worlds_of(files, names)
    with progress(console, "which world runs what", len(worlds)) as shown:
        if args.patch:
            coverage = hunt.cover_lines(workers, chosen, worlds, shown.advance)
            hunted = hunt_of_edits(chosen, coverage, args.seeds)
            for edit in chosen:
                _say_who_runs(console, edit, coverage)
        else:
            hunted = hunt_of(chosen, hunt.cover(workers, worlds, shown.advance), args.seeds)
        shown.start("runs", hunted.n_runs)
        try:
            for verdict in hunted.verdicts(workers, args.jobs, shown.advance):
                verdicts.add(verdict)
        except KeyboardInterrupt:
            return hunted.undecided()
    return ()


def _say_who_runs(console, edit, coverage):
    """Print how many worlds run the lines that an edit changes."""
    n = len(coverage.running(edit))
    beside = f", {len(coverage.beside(edit))} only their functions" if n else ""
    console.print(f"{edit.key}: {n} of {len(coverage.order)} worlds run the edited lines{beside}", markup=False)


def show_as_they_are(args, console):
    """Run the unedited kernels in all worlds and print each report as it comes."""
    from epmoe.mutants import hunt
    from epmoe.mutants.pieces import runs_of_random
    from epmoe.mutants.verdicts import word
    from epmoe.mutants.worlds import WORLDS

    start = time.perf_counter()
    runs = [(name, seed) for seed in range(args.seeds) for name in WORLDS]
    runs += runs_of_random(args.random)
    done = reported = 0
    try:
        with hunt.pool(args.jobs) as workers, progress(console, "the kernels as they are", len(runs)) as shown:
            for name, seed, how, report in workers.imap_unordered(hunt.as_they_are, runs):
                done, reported = done + 1, reported + bool(how)
                shown.advance()
                if how or args.list:
                    console.print(
                        f'{how or "silent":8} "{name}", seed {seed}', markup=False, style="bold red" if how else ""
                    )
                if report:
                    console.print(f"    {report}".replace("\n", "\n    "), markup=False)
    except KeyboardInterrupt:
        pass
    ended = done == len(runs)
    console.print(
        f"{word(reported, not ended)}  the unedited kernels: {len(WORLDS)} worlds, {args.seeds} seeds each, and "
        f"{args.random} random ones: {f'{reported} runs are' if reported else 'nothing is'} reported; "
        f"{'' if ended else f'{done} of {len(runs)} runs, '}{time.perf_counter() - start:.0f} s"
    )
    return (DIFFERS if reported else EQUAL) if ended else INTERRUPTED


def show_thresholds(args, console):
    """For each threshold of the kernels print how many worlds are on each side of it, and the first of them."""
    from epmoe.mutants import hunt, thresholds
    from epmoe.mutants.worlds import WORLDS

    seen = {}
    with hunt.pool(args.jobs) as workers, progress(console, "which world crosses what", len(WORLDS)) as shown:
        for name, sides in workers.imap_unordered(thresholds.sides_in, WORLDS):
            seen[name] = sides
            shown.advance()
    found = thresholds.crossings({name: seen[name] for name in WORLDS})
    missed = thresholds.uncrossed(found)
    for (file, line, text), worlds in found:
        word = "NOT CROSSED  " if (file, line, text) in missed else ""
        console.print(f"{word}{file}:{line} {text}", markup=False)
        for side, word in zip(worlds, ("below", "at", "above")):
            first = f', first "{worlds[side][0]}"' if worlds[side] else ""
            console.print(f"    {word:6}{len(worlds[side]):4}{first}", markup=False)
    console.print(f"{len(found)} thresholds, {len(WORLDS)} worlds: {len(missed)} crossed by none and not explained")
    return DIFFERS if missed else EQUAL


def write_faults(console):
    """Write the section of README.md on the public faults again, after a change of the kernels."""
    from epmoe.mutants.public_faults import README, document

    README.write_text(document())
    console.print(f"written: {README}", markup=False)
    return EQUAL


def show_faults(console):
    """Show each public fault, and the report on it."""
    from epmoe.mutants.public_faults import FAULTS, repaired_is_silent, report
    from epmoe.mutants.verdicts import word

    missed = 0
    for fault in FAULTS:
        how, text = report(fault)
        missed += not how
        console.print(f"\n[bold]{fault.name}[/bold]", markup=True)
        console.print(textwrap.fill(fault.what, WIDTH), markup=False)
        console.print(f"\n{wrapped(text, WIDTH) or 'NOT NOTICED'}", markup=False, style="" if how else "bold red")
        if fault.repair:
            silent = repaired_is_silent(fault)
            missed += not silent
            console.print(f"repaired ({fault.repair_is}): {'silent' if silent else 'REPORTED'}", markup=False)
    console.print(
        f"\n{word(missed)}  {len(FAULTS)} faults of public kernels, put into ours: {missed} not judged rightly"
    )
    return DIFFERS if missed else EQUAL
