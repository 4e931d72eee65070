"""Judges a puzzle's kernel: runs it in small worlds on many schedules, and says in words what goes wrong first."""

import ast
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from textwrap import fill

import numpy as np

from epmoe.device.sim.machine import Kernel
from epmoe.device.sim.recorder import Recorder
from epmoe.lessons.answers import Wrong, failed, function
from epmoe.lessons.telling import WIDTH, wrapped
from epmoe.puzzles.holes import changed, holes_of
from epmoe.puzzles.pictures import difference, history, picture
from epmoe.puzzles.world import NOT_YET, Schedule, run

SEEDS = 10
SCHEDULES = (Schedule(), *(Schedule(seed) for seed in range(SEEDS)), *(Schedule(seed, stale=True) for seed in range(4)))
# what a race report says -> the cause in words, for every puzzle; (region) is the racing one
RACES = (
    (
        "one of them is a plain access",
        "{region} is read by some threads while others write it: both sides need a strong access "
        "(ld_, st_, red_add_, atomic_add_), or an order between the two.",
    ),
    (
        "the scopes .* do not include",
        "{region} is shared further than the scope says: cta is one block, gpu is one GPU, sys is every GPU.",
    ),
    ("syncwarp", "the lanes of a warp do not wait for each other: a syncwarp() is missing."),
    ("syncthreads", "the warps of a block do not wait for each other: a syncthreads() is missing."),
    ("both write here", "several threads write the same place of {region}: only one of them should, or use an atomic."),
    ("the release comes before it", "the release comes too early: write first, signal after."),
    (
        "the write is relaxed",
        "the store or addition that others wait for is relaxed, so it orders nothing: release it.",
    ),
    ("the read is relaxed", "the load that waits is relaxed, so it orders nothing: acquire it."),
    (
        "the read came first|does not wait for one|does not acquire that word",
        "the reader does not wait for the writer.",
    ),
    ("both are strong stores", "two threads store different values, and nothing orders them."),
)
MISALIGNED = re.compile(r" at [^:]*:(\d+).*: (?:(\w+)\[)?[^:]* is not (\d+)-byte aligned \(address")
GENERAL = {
    "wrong": "the memory is not as it should be.",
    "race": "two threads touch {region}, and nothing orders them.",
    "hang": "a thread waits for something that never comes.",
    "bounds": "an address is wrong.",
}


@dataclass(frozen=True)
class Puzzle:
    """One puzzle.

    title, line: its name, and what it asks in one line. start: the file that --start writes. hints: from the first
    nudge to nearly all. worlds: function () -> Worlds, the simplest first. kernels: names of the kernels in the file,
    in the order in which they are launched. mistakes: (model, cause): model(world) gives, like World.expected, what
    the memory holds if this mistake was made. sign: function (Failure) -> cause or None, where wrong memory tells enough.
    cause: the same for everything else, behind the race, if there is one, that made the memory wrong. canonical: function
    (memory, world) -> memory, which takes away what is free. make: name of a function in the file, (*shape of a world) ->
    kernels, instead of `kernels`. more: function (puzzle, answer, tell) -> praise, which judges the rest; it calls tell()
    now and then.
    """

    title: str
    line: str
    start: str
    hints: tuple
    worlds: object
    cause: object
    kernels: tuple = ()
    mistakes: tuple = ()
    sign: object = None
    canonical: object = None
    make: str | None = None
    more: object = None

    @cached_property
    def constants(self):
        """{name: value} of the capitals that the file begins with, but TESTS; the judge relies on them."""
        found = {}
        for node in ast.parse(self.start).body:
            if isinstance(node, ast.Assign) and "TESTS" not in ast.unparse(node.targets[0]):
                exec(compile(ast.Module([node], []), "constants", "exec"), {}, found)
        return found


@dataclass(frozen=True)
class Failure:
    """What went wrong first. kind: "wrong", "race", "hang", "bounds" or "error".

    place: rank, region and index of the first difference. result.memory is canonical, raw as the kernel left it.
    source: the student's file. before: of a race, the Failure with wrong memory that made the judge look for it, if there was one.
    """

    puzzle: Puzzle
    world: object
    schedule: Schedule
    result: object
    kind: str
    place: tuple | None
    raw: tuple
    source: str
    before: object = None

    @property
    def report(self):
        """What the simulator says, "" if only the memory is wrong."""
        return self.result.report

    @property
    def region(self):
        """The region that differs, or that the report begins with."""
        found = re.search(r"data race on (\w[\w ]*?)[\[ ]", self.report)
        if found:
            return found[1]
        return self.place[1] if self.place else ""

    def race_on(self, *names):
        """Whether it is a race on one of these regions."""
        return self.kind == "race" and self.region in names

    def waits_for(self, *names):
        """Whether it is a hang in which a thread polls one of these regions."""
        return self.kind == "hang" and any(re.search(rf"(spins on|again at) {name}\[", self.report) for name in names)

    def says(self, pattern):
        """Whether the simulator's report matches."""
        return re.search(pattern, self.report, re.DOTALL) is not None

    def no_signal(self):
        """Whether all words of recv_count are NOT_YET."""
        return all((m["recv_count"] == NOT_YET).all() for m in self.raw)

    def only_zeros_missing(self):
        """Whether all words of recv_count that are NOT_YET should be 0."""
        return all(
            (self.should("recv_count", rank)[m["recv_count"] == NOT_YET] == 0).all() for rank, m in enumerate(self.raw)
        )

    def uses(self, pattern):
        """Whether the student's lines, comments left out, match."""
        return re.search(pattern, re.sub("#.*", "", "".join(holes_of(self.source)))) is not None

    def hole(self, i):
        """The student's lines in one hole, comments left out."""
        return re.sub("#.*", "", (holes_of(self.source) + [""] * (i + 1))[i])

    def differs(self, *names):
        """Whether one of these regions is the first that differs."""
        return self.place is not None and self.place[1] in names

    def holds(self, name, rank=None):
        """A region as it is, of the rank that differs."""
        return self.raw[self.place[0] if rank is None else rank][name]

    def should(self, name, rank=None):
        """The same as it should be."""
        return np.asarray(self.world.expected[self.place[0] if rank is None else rank][name])


def judge(puzzle, answer, schedules=SCHEDULES, tell=lambda: None):
    """Praise for a right answer, a student's module; raises Wrong, whose first paragraph is the cause.

    tell: called now and then while the judge is at work.
    """
    made, source = maker(puzzle, answer), Path(answer.__file__).read_text(encoding="utf-8")
    if says := changed(puzzle.start, source):
        n = re.search(r"Puzzle (\d+)", puzzle.start)[1]
        raise Wrong(
            f"{Path(answer.__file__).name} {says}. Put them back: `epmoe puzzle {n} --start NEW.py` writes them again."
        )
    worlds = puzzle.worlds()
    plain = replace(SCHEDULES[0], races=False)
    for world in worlds:
        _one(puzzle, answer, made(world), world, plain)
    for world in worlds:
        tell()
        for schedule in schedules:
            _one(puzzle, answer, made(world), world, schedule)
    runs = len(worlds) * (1 + len(schedules))
    praise = f"{runs} runs in {len(worlds)} worlds, {len(schedules)} schedules each: right, and no race."
    if all(world.n_ranks == 1 for world in worlds) and re.search("_sys(_|\\b)", "".join(holes_of(source))):
        praise += "\nScope gpu would do instead of sys: all blocks are on one GPU."
    if puzzle.more:
        praise += "\n" + puzzle.more(puzzle, answer, tell)
    return praise


def accesses(puzzle, answer, region):
    """What happens to this region in the first world."""
    world, recorder = puzzle.worlds()[0], Recorder()
    run(maker(puzzle, answer)(world), world, Schedule(), recorder=recorder)
    return [e for e in recorder.events if e.launch >= 0 and e.span and e.span.name == region]


def shared(region):
    """A Puzzle's `more`: Wrong unless each thread of its first world writes to this region."""

    def more(puzzle, answer, tell):
        world, writes = puzzle.worlds()[0], [e for e in accesses(puzzle, answer, region) if e.wrote is not None]
        busy, threads = len({(e.rank, e.block, e.thread) for e in writes}), world.n_ranks * world.grid * world.block
        if busy < threads:
            raise Wrong(
                f"{threads - busy} of {threads} threads have no part in the work: deal it out to all, as the puzzle "
                f"says.\n\nWorld: {world.name}. The memory is right."
            )
        return "All threads have a part in the work."

    return more


def maker(puzzle, answer):
    """Function (world) -> the student's kernels for it; Wrong if one is missing, or a constant was changed."""
    file = Path(answer.__file__).name
    for name, value in puzzle.constants.items():
        if not hasattr(answer, name):
            n = re.search(r"Puzzle (\d+)", puzzle.start)[1]
            raise Wrong(f"{file} has no {name}: is it the file that `epmoe puzzle {n} --start` wrote?")
        if getattr(answer, name) != value:
            raise Wrong(f"{file} has {name} = {getattr(answer, name)!r}: leave it at {value!r}")
    if puzzle.make:
        made = function(answer, puzzle.make)

        @cache
        def of_shape(shape):
            try:
                kernels = made(*shape)
            except Exception as error:
                raise Wrong(failed(answer.__file__, error, f"in {puzzle.make}{shape}")) from None
            if not isinstance(kernels, (list, tuple)) or not all(isinstance(k, Kernel) for k in kernels):
                raise Wrong(f"{puzzle.make} in {file} must return its kernels: leave its last line as it was")
            return kernels

        return lambda world: of_shape(world.data["shape"])
    found = [getattr(answer, name, None) for name in puzzle.kernels]
    for name, kern in zip(puzzle.kernels, found):
        if not isinstance(kern, Kernel):
            function(answer, name)
            raise Wrong(f"{name} in {file} is not a kernel: keep @kernel above it")
    return lambda world: found


def attempt(puzzle, kernels, world, schedule):
    """A Failure, or None if the run is right."""
    result = run(kernels, world, schedule)
    memory = raw = result.memory
    if puzzle.canonical and not result.kind:
        memory = puzzle.canonical(memory, world)
    result = replace(result, memory=memory)
    place = difference(memory, world)
    if not result.kind and place is None:
        return None
    source = Path(kernels[0].fn.__code__.co_filename).read_text(encoding="utf-8")
    return Failure(puzzle, world, schedule, result, result.kind or "wrong", place, raw, source)


def _one(puzzle, answer, kernels, world, schedule):
    failure = attempt(puzzle, kernels, world, schedule)
    if failure and failure.kind == "error":
        error = failure.result.error
        raise Wrong(failed(answer.__file__, error, "in the kernel") + _remedy(error))
    if failure:
        raise Wrong(told(kernels, failure))


def _remedy(error):
    """What to do about an error that students often meet, behind a full stop, or ""."""
    if isinstance(error, UnboundLocalError):
        return ".\nA thread that skips the `if` which sets a variable has none: set it before the `if` too."
    if isinstance(error, TypeError) and re.search("subscriptable|item assignment", str(error)):
        return ".\nA region is an address, not an array: read it with load_..., write it with store_..."
    return ""


def told(kernels, failure):
    """The whole verdict on a failure: cause, world and schedule, memory, report."""
    cause, wrong = mistaken(failure), failure
    # what a missing order does to memory says little: look for the race
    if failure.kind == "wrong" and not cause:
        failure = _race_behind(kernels, failure) or failure
    cause = cause or cause_of(failure)
    where = f"World: {failure.world.name}. Order of threads: {failure.schedule}."
    parts = [cause, fill(where, WIDTH)]
    if failure.kind == "race":
        wrong = wrong if wrong.kind == "wrong" else _harm(kernels, failure)
    if wrong is None:
        parts.append("Under the schedules tried here the memory came out right all the same. On a\nGPU it need not.")
    elif wrong.place:
        when = f"Under {wrong.schedule}:\n" if wrong.schedule != failure.schedule else ""
        place = difference(wrong.result.memory, wrong.world, named_in=cause + failure.report) or wrong.place
        parts.append(when + picture(wrong.result.memory, wrong.world, place))
        if wrong.kind == "wrong" and not failure.puzzle.canonical:
            parts.append(history(kernels, wrong.world, wrong.schedule, place))
    if failure.report:
        parts.append(wrapped(failure.report, WIDTH))
    return "\n\n".join(filter(None, parts))


def mistaken(failure):
    """The cause if the memory alone tells which mistake was made, else None."""
    if failure.kind != "wrong":
        return None
    for model, cause in failure.puzzle.mistakes:
        made = model(failure.world)
        if _same(made, failure.result.memory) and not _same(made, failure.world.expected):
            return cause
    return failure.puzzle.sign and failure.puzzle.sign(failure)


def _same(made, memory):
    """Whether the memory of every rank holds the arrays made of it."""
    return all(
        name in held and (np.asarray(array) == np.asarray(held[name])).all()
        for of_rank, held in zip(made, memory)
        for name, array in of_rank.items()
    )


def cause_of(failure):
    """The cause in words."""
    if at := MISALIGNED.search(failure.report):
        line, region, n = at.groups()
        return (
            f"line {line} accesses {n} bytes{f' in `{region}`' if region else ''} at an address that is no multiple of {n}. "
            f"Addresses count bytes: multiply the index by {n}."
        )
    cause = failure.puzzle.cause(failure)
    if cause:
        return cause
    if failure.kind == "race":
        for pattern, cause in RACES:
            if failure.says(pattern):
                return cause.format(region=failure.region)
    if failure.kind == "hang" and failure.says("the same ones repeat"):
        return "a loop never ends: nothing in it changes what its condition asks for."
    return GENERAL[failure.kind].format(region=failure.region)


def _race_behind(kernels, failure):
    """A race in the same world, where the memory is wrong and no mistake explains it."""
    for schedule in SCHEDULES:
        found = attempt(failure.puzzle, kernels, failure.world, schedule)
        if found and found.kind == "race":
            return replace(found, before=failure)
    return None


def _harm(kernels, failure):
    """A schedule in which the race makes the memory wrong, or None."""
    for n in range(SEEDS):
        schedule = Schedule(n // 2, stale=n % 2 == 1, races=False)
        found = attempt(failure.puzzle, kernels, failure.world, schedule)
        if found and found.kind in ("wrong", "hang"):
            return found
    return None
