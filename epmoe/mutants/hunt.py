"""Runs mutants in parallel processes until they are noticed: which worlds run their lines, and what killed each."""

import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass
from functools import lru_cache, partial

from epmoe.mutants import edited_kernels
from epmoe.mutants.errors import Leftover, WrongResult
from epmoe.mutants.marks import NAME, functions_of, marked_lines, marked_tokens
from epmoe.mutants.pairs import seen_in, statement_mutations_of_pairs
from epmoe.mutants.patches import Edit
from epmoe.mutants.plain_run import PlainRun
from epmoe.mutants.public_run import PublicRun
from epmoe.mutants.random_worlds import named
from epmoe.mutants.rows_run import RowsRun
from epmoe.mutants.statement_mutations import StatementMutation, statement_mutations_of
from epmoe.mutants.swiglu_run import SwigluRun
from epmoe.mutants.token_mutations import entrances, for_importers, imports_of, mutants_of, names_in
from epmoe.mutants.world_kinds import PlainWorld, PublicWorld, RowsWorld, SwigluWorld, World
from epmoe.mutants.world_run import WorldRun
from epmoe.mutants.worlds import WORLDS
from epmoe_ref.errors import DeadlockError, EPError, OutOfBoundsError, RaceError

KILLS = {
    RaceError: "race",
    DeadlockError: "hang",
    OutOfBoundsError: "bounds",
    WrongResult: "wrong",
    Leftover: "leftover",
    EPError: "error",
}
RUNS = {World: WorldRun, PlainWorld: PlainRun, RowsWorld: RowsRun, PublicWorld: PublicRun, SwigluWorld: SwigluRun}
SEEDS = 3
OWN_WORLDS = {"rows/": RowsWorld, "plain/": PlainWorld}


@dataclass(frozen=True)
class Verdict:
    """The outcome for a mutant. how: one of KILLS, "unused" (no world runs the line), or "survives"."""

    mutant: object
    how: str
    world: str = ""
    seed: int = 0
    report: str = ""
    seconds: float = 0.0

    @property
    def killed(self):
        return self.how not in ("survives", "unused")


@lru_cache(None)
def all_mutants():
    """Every mutant of every file of epmoe/kernels; files of PER_IMPORTER once for each module that imports them."""
    sources = {file: edited_kernels.source_of(file) for file in edited_kernels.files()}
    used = {file: names_in(source) for file, source in sources.items()}

    def importers(m):
        ways_in = entrances(sources[m.token.file], m.token.function)
        module = m.token.file.removesuffix(".py")
        folder = module.rpartition("/")[0]
        users = [
            file
            for file, source in sources.items()
            if file != m.token.file
            and file.startswith(folder)
            and (imports_of(source, module) & (ways_in | {"make"}))
            and used[file] & ways_in
        ]
        return [file.removesuffix(".py") for file in users]

    return for_importers([m for file, source in sources.items() for m in mutants_of(file, source)], importers)


def statements_in_pairs(workers, file):
    """The edited statements of kind "both", found by running worlds: a folder's own ones if no others run the file, else all."""
    return statement_mutations_of_pairs(set().union(*workers.map(_pairs, worlds_of([file], WORLDS))))


@lru_cache(None)
def statements_in_files():
    """The edited statements that are found from the source alone."""
    return [s for file in edited_kernels.files() for s in statement_mutations_of(file, edited_kernels.source_of(file))]


def _pairs(name):
    return seen_in(lambda: attempt(WORLDS[name], 0, {}))


def run_of(world, kernels, seed, **options):
    """The run of a world. go() runs and checks it."""
    return RUNS[type(world)](world, kernels, seed, **options)


def attempt(world, seed, edits, seen_by=None, **options):
    """(how, report) of one run with edited kernels. how is "" if it noticed nothing.

    In every third schedule strong loads return older values, within the limits of the memory model.
    """
    options = dict(stale=seed % SEEDS == SEEDS - 1) | options
    kernels = edited_kernels.load(edits, constants=world.constants, seen_by=seen_by)
    try:
        run_of(world, kernels, seed, **options).go()
    except tuple(KILLS) as error:
        return next(how for kind, how in KILLS.items() if isinstance(error, kind)), str(error)
    except (ArithmeticError, LookupError, NameError, TypeError, ValueError) as error:
        # an edited kernel may raise anything
        return "error", f"{type(error).__name__}: {error}"
    except RecursionError as error:  # the host repeats a call again and again
        return "hang", f"RecursionError: {error}"
    return "", ""


def as_they_are(run):
    """(world's name, seed, how, report) of a run (world's name, seed) of the unedited kernels."""
    name, seed = run
    return name, seed, *attempt(named(name), seed, {})


def hunt_by(mutant, runs):
    """The Verdict on one mutant. runs: [(world's name, seed)], tried in turn until one notices it."""
    start = time.perf_counter()
    edits = edits_of(mutant)
    for name, seed in runs:
        how, report = attempt(named(name), seed, edits, mutant.seen_by)
        if how:
            return Verdict(mutant, how, name, seed, report, time.perf_counter() - start)
    return Verdict(mutant, "survives" if runs else "unused", seconds=time.perf_counter() - start)


def edits_of(mutant):
    """{file: source} of the kernels with the mutant, and with its second edit if it has one."""
    if isinstance(mutant, Edit):
        return mutant.edits
    edits = {}
    for part in sorted(filter(None, (mutant, getattr(mutant, "other", None))), key=lambda p: -p.token.start):
        source = edits.get(part.token.file) or edited_kernels.source_of(part.token.file)
        edits[part.token.file] = part.apply(source)
    return edits


# ---------------------------------------------------------------- which worlds run which tokens
def visits(name, lines=None):
    """(name, tokens that this world runs: {(file, start, calling module)}, seconds). Unedited kernels must pass.

    lines: {file: numbers}. In these files statements on these lines are recorded instead, with -line for start. The
    race detector is then off, which saves two thirds of the time.
    """
    seen = set()
    edits = {}
    for file in edited_kernels.files() if lines is None else lines:
        source = edited_kernels.source_of(file)
        if lines is None:
            edits[file] = marked_tokens(file, source, {m.token.start: m.token for m in mutants_of(file, source)})
        else:
            edits[file] = marked_lines(file, source, lines[file])

    def visit(file, start):
        caller, here = sys._getframe(1), sys._getframe(1).f_code.co_filename
        while caller is not None and caller.f_code.co_filename == here:
            caller = caller.f_back
        seen.add((file, start, _stem(caller)))
        return True

    world, start = named(name), time.perf_counter()
    kernels = edited_kernels.load(edits, constants=world.constants, names={NAME: visit})
    run_of(world, kernels, 0, racecheck=lines is None).go()
    return name, seen, time.perf_counter() - start


def _stem(frame):
    """ "rows/senders" for a frame in rows/senders.py."""
    if frame is None:
        return ""
    return frame.f_code.co_filename.removeprefix(f"{edited_kernels.FOLDER}/").removesuffix(".py")


class Coverage:
    """{(file, start)} -> worlds, the cheapest first. Measured by running every world once with unedited kernels."""

    def __init__(self, runs):
        self.seen = {name: tokens for name, (tokens, _) in runs.items()}
        self.order = sorted(runs, key=lambda name: runs[name][1])

    def worlds(self, mutant):
        """Worlds that run the mutant's token, by name; if none does (a second poll), those that run nearby tokens."""
        at, by = (mutant.token.file, mutant.token.start), mutant.seen_by
        if isinstance(mutant, StatementMutation):
            return self.around(mutant)
        found = [name for name in self.order if any(v[:2] == at and by in (None, v[2]) for v in self.seen[name])]
        return found or self.around(mutant)

    def running(self, edit):
        """Names of the worlds that run lines of an Edit; worlds that run most of them come first."""
        runs = {name: self._runs(name, edit.lines) for name in self.order}
        return sorted(filter(runs.get, self.order), key=lambda name: -runs[name])

    def beside(self, edit):
        """Names of the worlds that run only the functions around these lines, as far as one schedule shows."""
        around, runs = functions_around(edit.lines), set(self.running(edit))
        return [name for name in self.order if name not in runs and self._runs(name, around)]

    def _runs(self, name, lines):
        """How many of the lines {file: numbers} a world runs."""
        return len({v[:2] for v in self.seen[name] if -v[1] in lines.get(v[0], ())})

    def around(self, mutant):
        """Names of the worlds that run a token on the same lines, or else one in its function."""
        file, by = mutant.token.file, mutant.seen_by
        first, last = getattr(mutant, "lines", (mutant.token.line,) * 2)
        tokens = [m.token for m in mutants_of(file, edited_kernels.source_of(file))]
        nearby = [lambda t: first <= t.line <= last, lambda t: t.function == mutant.token.function]
        if isinstance(mutant, StatementMutation):  # its function may have no other token
            nearby.append(lambda t: True)
        for near in nearby:
            starts = {t.start for t in tokens if near(t)}
            found = [
                name
                for name in self.order
                if any(v[0] == file and v[1] in starts and by in (None, v[2]) for v in self.seen[name])
            ]
            if found:
                return found
        return []


def pool(jobs):
    """A pool of freshly started processes. Each runs one simulator.

    They ignore Ctrl-C, and this process ends them. A process killed by Ctrl-C would leave the queues locked.
    """
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return multiprocessing.get_context("spawn").Pool(jobs)
    finally:
        signal.signal(signal.SIGINT, kept)


def cover(workers, names, advance=lambda: None, lines=None):
    """The Coverage of the named worlds, measured in parallel. Calls advance() after each one. lines: as in visits()."""
    runs = {}
    for name, *run in workers.imap_unordered(partial(visits, lines=lines), names):
        runs[name] = run
        advance()
    return Coverage(runs)


def functions_around(lines):
    """{file: lines at which the functions around the lines {file: numbers} begin to run}."""
    return {file: functions_of(edited_kernels.source_of(file), numbers) for file, numbers in lines.items()}


def cover_lines(workers, edits, names, advance=lambda: None):
    """The Coverage of the lines that edits change, and of the functions around them, in the named worlds."""
    lines = {}
    for of_edit in (e.lines for e in edits):
        for file, numbers in (*of_edit.items(), *functions_around(of_edit).items()):
            lines[file] = lines.get(file, set()) | numbers
    return cover(workers, names, advance, lines)


def worlds_of(files, names):
    """The names of worlds that can run these files. rows/ and plain/ have their own worlds."""
    for folder, kind in OWN_WORLDS.items():
        if all(file.startswith(folder) for file in files):
            return [name for name in names if isinstance(named(name), kind)]
    return list(names)
