"""The small worlds in which a puzzle's kernel runs: memory, launches, and what the memory must hold afterwards."""

from dataclasses import dataclass, field

import numpy as np

from epmoe import device
from epmoe.puzzles.given import TABLES
from epmoe_ref.errors import DeadlockError, EPError, OutOfBoundsError, RaceError

NOT_YET = 2**64 - 1  # of a signal that has not come
POISON = 0xA5  # of memory that nobody has written
KINDS = {RaceError: "race", DeadlockError: "hang", OutOfBoundsError: "bounds"}
N_SMS = 8


def many(n, noun):
    """ "1 token", "2 tokens"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


@dataclass(frozen=True)
class Region:
    """A named array in the memory of every rank. axes: names of its indices, for reports.

    by_round: the first axis is the round, and the kernel is given the part of its own round.
    """

    name: str
    shape: tuple
    dtype: type = np.int32
    axes: tuple = ()
    by_round: bool = False

    @property
    def nbytes(self):
        """Its size."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def offset(self, round_):
        """The byte at which the part of a round begins."""
        return round_ * self.nbytes // self.shape[0] if self.by_round else 0

    def unwritten(self, but_first=()):
        """The array as it is when nobody has written it; but_first: what it begins with."""
        array = np.full(self.nbytes, POISON, np.uint8).view(self.dtype).reshape(self.shape)
        for i, value in enumerate(but_first):
            array[i] = value
        return array


@dataclass(frozen=True)
class World:
    """One world. name: what it is, in words. grid, block: of each launch. tokens: num_tokens of each rank.

    start, expected: for each rank {name of a region: array}. A region that is not in `start` begins unwritten. One that
    is not in `expected` may hold anything afterwards. rounds: launches of the kernel on each rank, one after another.
    data: whatever the puzzle wants to remember about it. blocks: how many of a rank run at once, at most.
    """

    name: str
    regions: tuple
    tokens: tuple
    start: tuple
    expected: tuple
    grid: int = 1
    block: int = 32
    rounds: int = 1
    blocks: int | None = None
    data: dict = field(default_factory=dict, hash=False, compare=False)

    @property
    def n_ranks(self):
        """How many ranks there are."""
        return len(self.tokens)

    def region(self, name):
        """The region of that name."""
        return next(r for r in self.regions if r.name == name)


@dataclass(frozen=True)
class Schedule:
    """An order in which the threads take turns. seed None: plain turns. stale: loads may return old values.

    races: whether the race detector looks on.
    """

    seed: int | None = None
    stale: bool = False
    races: bool = True

    def __str__(self):
        turns = "plain turns" if self.seed is None else f"schedule {self.seed}"
        return f"{turns}{', loads may return old values' if self.stale else ''}"


@dataclass(frozen=True)
class Result:
    """What a run came to. kind: "" if it ended, else "race", "hang", "bounds" or "error".

    report: of the simulator, "" if it has none. memory: for each rank {name: array}, as it was at the end. error: the
    exception, if any.
    """

    kind: str
    report: str
    memory: tuple
    error: BaseException | None = None


class Memory:
    """All regions of all ranks on a machine, and the tables through which kernels find them."""

    def __init__(self, machine, world):
        self.machine, self.world = machine, world
        self.buffers = [
            {
                r.name: machine.alloc(r.nbytes, r.name, rank, regions=[(r.name, 0, r.shape, r.dtype, r.axes)])
                for r in world.regions
            }
            for rank in range(world.n_ranks)
        ]
        self.tables = []
        for words in self._tables():
            table = machine.alloc(words.nbytes, "params")
            self.tables.append(table)
            table.write(words)
            TABLES[table.address] = words.tolist()
        for buffers, start in zip(self.buffers, world.start):
            for r in world.regions:
                buffers[r.name].fill(POISON)
                if r.name in start:
                    buffers[r.name].write(np.ascontiguousarray(start[r.name], r.dtype))

    def _tables(self):
        w = self.world
        return [
            np.array(
                [w.n_ranks] + [b[r.name].address + r.offset(n) for r in w.regions for b in self.buffers], np.uint64
            )
            for n in range(w.rounds)
        ]

    def read(self):
        """For each rank {name: array}, after all launches have ended."""
        return tuple({r.name: b[r.name].read(r.dtype, r.shape) for r in self.world.regions} for b in self.buffers)

    def launch(self, kernels):
        """Queue every round of every rank: the kernels one after another on the rank's stream."""
        w = self.world
        with self.machine.hold():
            streams = [self.machine.stream(rank) for rank in range(w.n_ranks)]
            for table in self.tables:
                for rank, stream in enumerate(streams):
                    for kern in kernels:
                        self.machine.launch(kern, w.grid, w.block, (table.address, w.tokens[rank], rank), stream=stream)

    def free(self):
        """Give the memory back."""
        for table in self.tables:
            del TABLES[table.address]
        for buffer in [*self.tables, *(b for of_rank in self.buffers for b in of_rank.values())]:
            buffer.free()


def run(kernels, world, schedule, *, recorder=None, go_on=False):
    """The Result of one run in the simulator. go_on: not even a race ends it."""
    machine = device.machine(
        world.n_ranks,
        seed=schedule.seed,
        racecheck=schedule.races,
        stale=schedule.stale,
        n_sms=N_SMS,
        stop_at_first_race=not go_on,
        recorder=recorder,
        resident_limit=world.blocks,
    )
    memory, kind, report, error = Memory(machine, world), "", "", None
    try:
        memory.launch(kernels)
    except EPError as found:
        kind, error = next((k for c, k in KINDS.items() if isinstance(found, c)), "error"), found
        report = str(found).replace("which holds 2**64 - 1", "which holds NOT_YET")
    except (Exception, SystemExit) as found:
        kind, error = "error", found
    held = memory.read()
    memory.free()
    return Result(kind, report, held, error)
