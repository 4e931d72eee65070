"""A world and tensors on counted_driver, without a GPU, and how many functions a call runs."""

import contextlib
import os
import sys
from pathlib import Path

os.environ["EPMOE_DEVICE"] = "gpu"
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from counted_driver import FakeTensor, bfloat16, counted_machine, float32, int32  # noqa: E402
from counted_rounds import a_round  # noqa: E402

from epmoe import EPConfig, ExpertParallel  # noqa: E402
from epmoe.worlds.dry import DryWorld  # noqa: E402
from epmoe.worlds.symmetric import SymmetricMemory  # noqa: E402

STREAM = 77  # handle of the caller's stream


class OneRankHere(DryWorld):
    """A world as MPIWorld makes it on GPUs: rank 0 of n_ranks in this process, the others' memory beside it."""

    shmem = False

    def __init__(self, machine, n_ranks):
        self.machine, self.n_ranks = machine, n_ranks
        self._stream = machine.stream(0, handle=STREAM)

    def hear(self, value, timeout):
        """{rank: value} of the ranks whose calls also failed."""
        return {0: value}

    def allocate(self, nbytes, name, regions, timeout):
        """Memory of all ranks, of which rank 0's is this process's."""
        buffers = [self.machine.alloc(nbytes, name, rank) for rank in range(self.n_ranks)]
        return SymmetricMemory(dict(enumerate(buffers)), [b.address for b in buffers])


@contextlib.contextmanager
def at_hand(*, does_nothing=False, rounds=0, **options):
    """(ExpertParallel over OneRankHere, driver, tensors x, ids, weights).

    does_nothing: launches are not even counted. rounds: that came before, on these tensors.
    """
    cfg = EPConfig(2, 16, 8, 64, 4)
    machine, driver = counted_machine(2, 0)
    if does_nothing:
        without_python(driver)
    with ExpertParallel(cfg, OneRankHere(machine, 2), **options) as ep:
        for _ in range(rounds):
            a_round(ep, *tensors())
        yield ep, driver, tensors()


def without_python(driver):
    """A launch that is not even counted."""
    driver.cuLaunchKernelEx = lambda *given, success=(driver.CUresult.CUDA_SUCCESS,): success


def tensors(at=0x10000, n=4, ids_dtype=int32):
    """x, ids and weights of n tokens as tensors from an address on."""
    return (
        FakeTensor(at, (n, 64), bfloat16),
        FakeTensor(at + 0x1000, (n, 8), ids_dtype),
        FakeTensor(at + 0x2000, (n, 8), float32),
    )


def python_calls(function, *args):
    """(number of Python functions, number of built-in functions) that a call of function runs, and its result."""
    counts = {"call": 0, "c_call": 0}

    def count(frame, event, arg):
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return counts["call"] - 1, counts["c_call"] - 1, result  # less count's own uninstalling
