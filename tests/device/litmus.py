"""Small programs of a few threads, run under the race detector."""

import inspect

import numpy as np
import pytest

from epmoe import device
from epmoe.device import block_idx, kernel, thread_idx, u64
from epmoe_ref.errors import DeadlockError, RaceError

REGIONS = [
    ("flag", 0, (16,), "i4", ("slot",)),
    ("data", 64, (64, 4), "i4", ("thread", "word")),
    ("out", 2048, (256,), "i4", ("i",)),
]
FLAG, DATA, OUT = 0, 64, 2048


def nothing():
    """In the place of a synchronisation."""


def execute(program, *, ranks=1, grid=1, block=32, seed=0, launches=1, shared_bytes=0, slow_ranks=(), **options):
    """Run a kernel on every rank, all on the words of rank 0. Returns the memory as int32."""
    options.setdefault("racecheck", True)
    machine = device.machine(ranks, seed=seed, **options)
    machine.slow_ranks = slow_ranks
    buffer = machine.alloc(4096, "words", regions=REGIONS)
    try:
        buffer.fill(0)
        streams = [machine.stream(r) for r in range(ranks)]
        for _ in range(launches):
            for r in range(ranks):
                machine.launch(
                    program, grid, block, (buffer.address, 0, r), stream=streams[r], shared_bytes=shared_bytes
                )
        machine.synchronize()
        return buffer.read(np.int32, 1024)
    finally:
        buffer.free()


def first_race(program, seeds=range(4), **options):
    """The text of the first race that a seed shows, or None."""
    for seed in seeds:
        try:
            execute(program, seed=seed, **options)
        except RaceError as race:
            return str(race)
    return None


def hang(program, **options):
    """The text of the DeadlockError that a kernel raises."""
    with pytest.raises(DeadlockError) as caught:
        execute(program, racecheck=False, **options)
    return str(caught.value)


def blocks(*programs):
    """A kernel: the first thread of block i runs programs[i](address of the flag, address of the data)."""

    @kernel()
    def one_program_each(params, num_tokens, my_rank):
        if thread_idx() == 0:
            programs[block_idx()](params + u64(FLAG), params + u64(DATA))

    return one_program_each


def race_of_blocks(*programs, **options):
    """The text of the first race of blocks that run one of these programs each, or None."""
    return first_race(blocks(*programs), grid=len(programs), **options)


def wait_for(load, word, value):
    """Spin until the word holds the value."""
    while load(word) != value:
        pass


def line_of(program, text):
    """ "file.py:line" of the line of a kernel's source that contains the text."""
    lines, start = inspect.getsourcelines(program.fn)
    return "%s:%d" % (
        program.fn.__code__.co_filename.rpartition("/")[2],
        start + next(i for i, s in enumerate(lines) if text in s),
    )
