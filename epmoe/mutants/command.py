"""`python -m epmoe mutants`: breaks every synchronisation of the kernels in turn, and sees whether it is noticed.

Or what patches make of the kernels; or the kernels as they are, which must run in silence.
"""

import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from epmoe_ref.errors import EPValueError

from epmoe.command_line import at_least_one, at_least_zero, part_of_all

NOTICED, MISSED, CANNOT_RUN = 0, 1, 2
MEANING = {"race": "data race reported", "wrong": "results differ from the reference", "hang": "every thread waits",
           "bounds": "access outside every buffer", "leftover": "memory not as before the rounds, or written in vain",
           "error": "the kernel failed otherwise", "survives": "nothing noticed it", "unused": "no world runs the line"}

SURVIVES = ("survives: either the synchronisation is not needed (say why in epmoe/mutants/harmless.py), or no world "
            "shows that it is")
NO_WORLD = ("survives: either it changes nothing that results, memory or the order of accesses show, or no world of "
            "epmoe/mutants/worlds.py has the circumstances: add one")
UNUSED = "is run by no world of epmoe/mutants/worlds.py: add one"
KINDS = ("order", "scope", "plain", "barrier", "reset", "wait", "nc",
         "swap", "early", "skip", "off by one", "twice", "whose", "both", "patch")


def add_arguments(parser):
    """The options of mutants."""
    parser.add_argument("--sample", type=at_least_one, metavar="N", help="only N mutants, always the same ones")
    parser.add_argument("--only", metavar="FILE[:LINE]", help="only mutants of a file of epmoe/kernels, or of its line")
    parser.add_argument("--seeds", type=at_least_one, default=3, metavar="N",
                        help="schedules tried in each world (default 3)")
    parser.add_argument("--jobs", type=at_least_one, default=os.cpu_count(), metavar="N",
                        help="processes (default: one a core)")
    parser.add_argument("--list", action="store_true", help="print every mutant's verdict, not only the survivors'")
    parser.add_argument("--reports", action="store_true", help="print what was reported for each killed mutant too")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--slips", action="store_true", help="instead: mistakes of another make (statements swapped, "
                         "waits off by one, resets left out on some ranks, ...)")
    instead.add_argument("--patch", nargs="+", metavar="FILE", help="instead: what each of these unified diffs "
                         "(`git diff`) makes of epmoe/kernels, in all worlds")
    instead.add_argument("--as-they-are", action="store_true", help="instead: the kernels as they stand in the tree, "
                         "in all worlds; nothing may be reported")
    instead.add_argument("--faults", action="store_true", help="instead: four faults of public kernels, and the "
                         "reports")
    parser.add_argument("--random", type=at_least_zero, default=40, metavar="N", help="with --patch and --as-they-are: "
                        "so many random worlds behind the others, one schedule each (default 40)")
    parser.add_argument("--part", type=part_of_all, metavar="I/N", help="every Nth mutant from the Ith on")
    parser.add_argument("--write", action="store_true", help="with --faults: write README.md of epmoe/mutants")


def run(args, console=None):
    """Hunt mutants; the exit status is 0 if exactly the harmless ones survive, 1 if not, 2 if it cannot be run."""
    from epmoe import device
    from epmoe.mutants import hunt

    if console is None:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)      # places stay whole, as editors need them
    if not device.SIM:
        print("epmoe mutants: races are seen in the simulator only, and a GPU is used: set EPMOE_DEVICE=sim",
              file=sys.stderr)
        return CANNOT_RUN
    if args.faults:
        return write_faults(console) if args.write else show_faults(console)
    if args.as_they_are:
        return show_as_they_are(args, console)
    start = time.perf_counter()
    try:
        patches = read_patches(args)
        with hunt.pool(args.jobs) as workers:
            verdicts = _hunt_with_progress(workers, choose(args, workers, patches), args, console)
    except EPValueError as error:
        print(f"epmoe mutants: {error}", file=sys.stderr)
        return CANNOT_RUN
    except tuple(hunt.KILLS) as error:
        print(f"epmoe mutants: the kernels as they stand fail (--as-they-are shows where): {error}", file=sys.stderr)
        return CANNOT_RUN
    unexpected = judge(verdicts)
    _show(console, args, verdicts, unexpected, time.perf_counter() - start)
    return MISSED if unexpected else NOTICED


def read_patches(args):
    """The edits that --patch names; EPValueError if one is not to be had."""
    from epmoe.mutants.patches import edit_of

    if args.patch and args.only:
        raise EPValueError(f"--only {args.only} chooses among mutants made of the source: leave it out with --patch")
    texts = [(name, Path(name).read_text(errors="surrogateescape")) for name in args.patch or ()]
    return [edit_of(name, text) for name, text in texts]


def choose(args, workers, patches=()):
    """The mutants that the options ask for."""
    from epmoe.mutants import hunt

    mutants = list(patches) or (hunt.all_slips(workers) if args.slips else hunt.all_mutants())
    if args.only:
        file, _, line = args.only.partition(":")
        mutants = [m for m in mutants if m.token.file in (file, f"{file}.py") and line in ("", str(m.token.line))]
        if not mutants:
            raise EPValueError(f"--only {args.only}: no synchronising token there; give a file of epmoe/kernels "
                               "(spin.py, formats/row_copy.py), and the line of a token or none")
    if args.sample and args.sample < len(mutants):
        mutants = random.Random(0).sample(mutants, args.sample)
    if args.part:
        number, of = args.part
        mutants = mutants[number - 1::of]
    return mutants


def harmless_ones():
    """{key: reason} of the mutants and slips that change nothing."""
    from epmoe.mutants.harmless import HARMLESS
    from epmoe.mutants.harmless_slips import HARMLESS_SLIPS

    return HARMLESS | HARMLESS_SLIPS


def judge(verdicts):
    """[(verdict, what is wrong with it)]: survivors not known to be harmless, and harmless ones that were killed."""
    known = harmless_ones()
    found = []
    for v in verdicts:
        if v.killed and v.mutant.key in known:
            found.append((v, f"is written down as harmless, and was killed: {v.how} in \"{v.world}\", seed {v.seed}"))
        elif not v.killed and v.mutant.key not in known:
            found.append((v, NO_WORLD if v.mutant.kind == "patch" else SURVIVES if v.how == "survives" else UNUSED))
    return found


def _hunt_with_progress(workers, chosen, args, console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from epmoe.mutants import hunt
    from epmoe.mutants.pieces import hunt_in_pieces
    from epmoe.mutants.worlds import WORLDS

    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    verdicts = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("which world runs what", total=len(WORLDS))
        if args.patch:
            coverage = hunt.cover_lines(workers, chosen, lambda: progress.advance(task))
            hunted = hunt_in_pieces(workers, args.jobs, chosen, coverage, args.seeds, args.random)
        else:
            coverage = hunt.cover(workers, lambda: progress.advance(task))
            hunted = hunt.hunt_all(workers, chosen, coverage, args.seeds, first=harmless_ones())
        progress.update(task, description="mutants", completed=0, total=len(chosen))
        for verdict in hunted:
            verdicts.append(verdict)
            progress.advance(task)
    return sorted(verdicts, key=lambda v: (v.mutant.token.file, v.mutant.token.start, v.mutant.key))


def _show(console, args, verdicts, unexpected, seconds):
    from rich.table import Table

    known = harmless_ones()
    counts = Counter((v.mutant.kind, v.how) for v in verdicts)
    hows = [how for how in MEANING if any(h == how for _, h in counts)]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("what was done", style="bold")
    for column in ("mutants", *hows):
        table.add_column(column, justify="right")
    kinds = [k for k in KINDS if any(kind == k for kind, _ in counts)]
    for kind in kinds:
        of = [counts[kind, how] for how in hows]
        table.add_row(kind, str(sum(of)), *(str(n) if n else "" for n in of))
    of = [sum(counts[kind, how] for kind in kinds) for how in hows]
    table.add_row("all", *map(str, (sum(of), *of)), style="bold")
    console.print(table)
    console.print("; ".join(f"{how}: {MEANING[how]}" for how in hows), style="dim")
    for v in verdicts:
        if args.list or (not v.killed and v.mutant.key in known):
            _line(console, v, known.get(v.mutant.key))
        if args.reports and v.killed:
            console.print(f"    {v.report}".replace("\n", "\n    "), markup=False, style="dim")
    for v, what in unexpected:
        console.print(f"\n[bold red]{v.mutant.token.place}[/bold red]")
        console.print(f"{v.mutant.key}\n{what}\n{v.report}".rstrip(), markup=False)
    harmless = sum(not v.killed for v in verdicts) - sum(not v.killed for v, _ in unexpected)
    word = "[bold red]FAIL[/bold red]" if unexpected else "[bold green]PASS[/bold green]"
    console.print(f"\n{word}  {len(verdicts)} mutants: {sum(v.killed for v in verdicts)} noticed, {harmless} known to "
                  f"be harmless, {len(unexpected)} not as expected; {args.seeds} seeds, {seconds:.0f} s")


def _line(console, v, reason):
    where = f" in \"{v.world}\", seed {v.seed}" if v.killed else f": {reason}" if reason else ""
    console.print(f"{v.how:8} {v.mutant.token.place:24} {v.mutant.kind}: {v.mutant.change}"
                  f"{' seen by ' + v.mutant.seen_by if v.mutant.seen_by else ''}{where}", markup=False)


def show_as_they_are(args, console):
    """Unedited kernels in all worlds: what is reported, where."""
    from rich.progress import track

    from epmoe.mutants import hunt
    from epmoe.mutants.pieces import runs_of_random
    from epmoe.mutants.worlds import WORLDS

    start, runs = time.perf_counter(), [(name, seed) for seed in range(args.seeds) for name in WORLDS]
    runs += runs_of_random(args.random)
    with hunt.pool(args.jobs) as workers:
        done = list(track(workers.imap_unordered(hunt.as_they_are, runs), "the kernels as they are", len(runs),
                          console=console, transient=True))
    reported = [d for d in done if d[2]]
    for name, seed, how, report in sorted(done if args.list else reported):
        console.print(f"{how or 'silent':8} \"{name}\", seed {seed}", markup=False, style="bold red" if how else "")
        if report:
            console.print(f"    {report}".replace("\n", "\n    "), markup=False)
    word = "[bold red]FAIL[/bold red]" if reported else "[bold green]PASS[/bold green]"
    console.print(f"{word}  the kernels as they stand: {len(WORLDS)} worlds, {args.seeds} seeds each, and "
                  f"{args.random} random ones: {f'{len(reported)} runs are' if reported else 'nothing is'} reported; "
                  f"{time.perf_counter() - start:.0f} s")
    return MISSED if reported else NOTICED


def write_faults(console):
    """The document on the public faults, after a change of the kernels."""
    from epmoe.mutants import document

    document.README.write_text(document.text())
    console.print(f"written: {document.README}", markup=False)
    return NOTICED


def show_faults(console):
    """The public faults: what each is, and what the checker says."""
    from epmoe.mutants.public_faults import FAULTS, repaired_is_silent, report

    missed = 0
    for fault in FAULTS:
        how, text = report(fault)
        missed += not how
        console.print(f"\n[bold]{fault.name}[/bold]", markup=True)
        console.print(fault.what, markup=False)
        console.print(f"\n{text or 'NOT NOTICED'}", markup=False, style="" if how else "bold red")
        if fault.repair:
            silent = repaired_is_silent(fault)
            missed += not silent
            console.print(f"repaired ({fault.repair_is}): {'silent' if silent else 'REPORTED'}", markup=False)
    word = "[bold red]FAIL[/bold red]" if missed else "[bold green]PASS[/bold green]"
    console.print(f"\n{word}  {len(FAULTS)} faults of public kernels, put into ours: {missed} not judged rightly")
    return MISSED if missed else NOTICED
