"""What calls cost the host: `python tests/host/host_cost.py` prints microseconds and Python calls of each phase.

Runs without a GPU, on counted_driver; the driver's own time is not in it.
"""

import contextlib
import os
import sys
import time
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


def spent(ep, batches):
    """Median microseconds of dispatch and combine in rounds on these (x, ids, weights), one after another."""
    seconds = {"dispatch": [], "combine": []}
    for x, ids, weights in batches:
        y = FakeTensor(x.data_ptr() + 0x8000, (ep.capacity, 64), bfloat16)
        t0 = time.perf_counter()
        d = ep.dispatch(x, ids)
        t1 = time.perf_counter()
        ep.combine(y, d, weights)
        seconds["combine"].append(time.perf_counter() - t1)
        seconds["dispatch"].append(t1 - t0)
    return "  ".join(f"{name} {1e6 * sorted(s)[len(s) // 2]:.1f} us" for name, s in seconds.items())


def main():
    with at_hand(does_nothing=True) as (ep, driver, (x, ids, weights)):
        for name, batches in [
            ("the same arrays", [tensors()]),
            ("4 layers in turn", [tensors(0x10000 * (1 + i)) for i in range(4)]),
            ("arrays that are new", (tensors(0x100000 + 0x10000 * i) for i in range(2000))),
        ]:
            rounds = batches if name == "arrays that are new" else batches * (2000 // len(batches))
            print(f"{name:20} {spent(ep, rounds)}")
        for _ in range(6):
            a_round(ep, x, ids, weights)
        calls, built_in, d = python_calls(ep.dispatch, x, ids)
        print(f"dispatch runs {calls} Python functions, {built_in} built-in ones", end="; ")
        y = d.output_tokens
        calls, built_in, _ = python_calls(ep.combine, y, d, weights)
        print(f"combine {calls} and {built_in}")


if __name__ == "__main__":
    main()
