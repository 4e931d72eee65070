"""A start line of two ranks in one process, on a driver that only counts: what a failing rank tells the other.

`python start_line_program.py` with EPMOE_DEVICE=gpu; test_start_line.py runs it.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from counted_driver import counted_machine

from benchmarks import startline
from benchmarks.startline import EXPIRED_AT, FAILED, LeftBehind, StartLine, meeting_kernel
from epmoe_ref.errors import EPError, PeerTimeout


def fails(error, said, function, *args):
    try:
        function(*args)
    except EPError as raised:
        assert type(raised) is error and said in str(raised), raised
        return
    raise AssertionError(f"no {error.__name__} that says {said}")


def line_of(machine, rank, memory):
    return StartLine(
        SimpleNamespace(
            machine=machine,
            lists=False,
            n_ranks=2,
            ranks=range(rank, rank + 1),
            barrier=lambda *_: None,
            allocate=lambda *_: memory,
            tell=lambda value, _: [value] * 2,
        )
    )


startline.FLUSH_BYTES = 4096  # memory that nobody looks at
meeting_kernel(4, 300).binary((9, 0))  # before the driver is replaced
machine, driver = counted_machine(2, 0)
CODES = driver.CUresult
stream, none_failed = machine.stream(0, handle=77), lambda: None
buffers = [machine.alloc(4096, "flags", rank) for rank in range(2)]
memory = SimpleNamespace(buffers=buffers, addresses=[buffer.address for buffer in buffers])
lines = [line_of(machine, rank, memory) for rank in range(2)]


def expired():
    return [int(buffer.read(np.uint32, (1,), EXPIRED_AT)[0]) for buffer in buffers]


def start_again():
    for line in lines:
        line.meet_again()
        line.check()
    assert expired() == [0, 0]


def queried(*codes):
    """The stream answers these, one after another."""
    left = iter(codes)
    driver.cuStreamQuery = lambda handle: (next(left),)


# A rank that fails tells all ranks; their kernels and hosts then stop waiting
lines[1].give_up()
assert expired() == 2 * [FAILED + 1]
fails(LeftBehind, "rank 0: rank 1 failed", lines[0].check)
start_again()

# A rank whose device has failed cannot write; the others learn it from the host
driver.cuMemcpyHtoDAsync = lambda *_: (CODES.CUDA_ERROR_ILLEGAL_ADDRESS,)
lines[1].give_up()
del driver.cuMemcpyHtoDAsync
assert expired() == [0, 0]
queried(CODES.CUDA_ERROR_NOT_READY, CODES.CUDA_ERROR_NOT_READY)
told = iter([None, 1])
fails(LeftBehind, "rank 0: rank 1 failed", lines[0].drain, stream, partial(next, told))
assert expired() == [FAILED + 1, 0]
start_again()

# A rank whose wait expires names the missing ranks; nobody waits for finished or failed work
buffers[0].write(np.array([2], np.uint32), EXPIRED_AT)
fails(PeerTimeout, "rank 0: rank 1 did not come", lines[0].check)
queried(CODES.CUDA_ERROR_NOT_READY, CODES.CUDA_SUCCESS)
lines[0].drain(stream, none_failed)
queried(CODES.CUDA_ERROR_ILLEGAL_ADDRESS)
driver.cuGetErrorString = lambda code: (None, b"")
fails(EPError, "CUDA_ERROR_ILLEGAL_ADDRESS", lines[0].drain, stream, none_failed)
print("as it should be")
