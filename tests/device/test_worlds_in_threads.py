"""Worlds in several threads of the operating system take turns, with the same results as in one thread."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
from litmus import OUT

from epmoe import EPConfig, ExpertParallel, LocalWorld, device
from epmoe.device import atomic_add_relaxed_gpu_i32, kernel, syncthreads, u64
from epmoe.device.sim.threads import SimThread


def in_threads(n, work):
    """Run work(i) in n threads at once; their results. An exception in one is raised here."""
    ready = threading.Barrier(n)

    def call(i):
        ready.wait()
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(call, range(n)))


@kernel()
def adds(params, num_tokens, my_rank):
    for _ in range(20):
        atomic_add_relaxed_gpu_i32(params + u64(OUT), 1)
        syncthreads()


def sum_of_a_launch(machine, buffer):
    buffer.fill(0)
    machine.launch(adds, 2, 32, (buffer.address, 0, 0), stream=machine.stream())
    return int(buffer.read(np.int32, 1, OUT)[0])


def sums_of_launches(machine):
    """Each in memory of its own."""
    buffers, sums = [machine.alloc(4096, "words") for _ in range(3)], []
    for buffer in buffers:
        sums.append(sum_of_a_launch(machine, buffer))
        buffer.free()
    return sums


def test_each_thread_has_a_machine_of_its_own():
    sums = in_threads(4, lambda i: sums_of_launches(device.machine(1, seed=i, racecheck=bool(i % 2))))
    assert sums == [[2 * 32 * 20] * 3] * 4


def test_a_machine_may_be_used_by_one_thread_after_another():
    machine = device.machine(1, seed=0)
    buffer = machine.alloc(4096, "words")
    for _ in range(3):
        sums = in_threads(1, lambda _: sum_of_a_launch(machine, buffer)) + [sum_of_a_launch(machine, buffer)]
        assert sums == [2 * 32 * 20] * 2
    buffer.free()


def test_rounds_of_two_worlds_at_once_are_those_of_one():
    cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=3)

    def a_round(i):
        rng = np.random.default_rng(i)
        with ExpertParallel(cfg, LocalWorld(2, seed=i)) as ep:
            x = [rng.standard_normal((3, 16)).astype(ml_dtypes.bfloat16) for _ in range(2)]
            ids = [rng.permuted(np.tile(np.arange(4, dtype=np.int32), (3, 1)), axis=1)[:, :2] for _ in range(2)]
            d = ep.dispatch(x, ids)
            weights = [rng.random((3, 2)).astype(np.float32) for _ in range(2)]
            return np.stack(ep.combine([r.output_tokens for r in d], d, weights)).view(np.uint16)

    alone = [a_round(i) for i in range(2)]
    for together, want in zip(in_threads(2, a_round), alone):
        assert (together == want).all()


def test_a_thread_leaves_no_greenlets_behind():
    def greenlets():
        gc.collect()
        return sum(isinstance(o, SimThread) for o in gc.get_objects())

    before = greenlets()
    in_threads(2, lambda _: sums_of_launches(device.machine(1, seed=0)))
    assert greenlets() == before
