"""Small programs of a few threads, run under the race detector."""

import inspect

import numpy as np

from epmoe import device
from epmoe_ref.errors import RaceError

REGIONS = [
    ("flag", 0, (16,), "i4", ("slot",)),
    ("data", 64, (64, 4), "i4", ("thread", "word")),
    ("out", 2048, (256,), "i4", ("i",)),
]
FLAG, DATA, OUT = 0, 64, 2048


def nothing():
    """In the place of a synchronisation."""


def execute(kernel, *, ranks=1, grid=1, block=32, seed=0, launches=1, shared_bytes=0, slow_ranks=(), **options):
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
                    kernel, grid, block, (buffer.address, 0, r), stream=streams[r], shared_bytes=shared_bytes
                )
        machine.synchronize()
        return buffer.read(np.int32, 1024)
    finally:
        buffer.free()


def first_race(kernel, seeds=range(4), **options):
    """The text of the first race that a seed shows, or None."""
    for seed in seeds:
        try:
            execute(kernel, seed=seed, **options)
        except RaceError as race:
            return str(race)
    return None


def line_of(kernel, text):
    """ "file.py:line" of the line of a kernel's source that contains the text."""
    lines, start = inspect.getsourcelines(kernel.fn)
    return "%s:%d" % (
        kernel.fn.__code__.co_filename.rpartition("/")[2],
        start + next(i for i, s in enumerate(lines) if text in s),
    )
