"""Runs a benchmark's contenders in turn on four ranks of this process, with a driver that runs nothing.

Each rank collects garbage and frees memory at different moments, holds results and captures calls. All ranks must
launch the same and meet equally often. Launches may only use live memory, and closed contenders must leave none.

`python ranks_program.py` with EPMOE_DEVICE=gpu, and perhaps a seed and seconds; test_ranks_launch_alike.py runs it.
"""

import bisect
import ctypes
import gc
import mmap
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

import counted_driver
from host_cost import OneRankHere

from benchmarks import plan, shapes, traffic
from epmoe.device import gpu_machine
from epmoe.fused_a2a.buffer import Again, Buffer
from epmoe.worlds.symmetric import SymmetricMemory

RANKS, HIDDEN, EXPERTS = 4, 256, 16
NO_RESERVE = 0x4000  # of mmap
ROOM = 64 << 30  # bytes of address space; no address is given twice
PAGE, ITERATIONS = 4096, 16
CAPTURED = (8, 9)  # iterations
events = defaultdict(list)  # rank -> its launches and meetings


class Driver(counted_driver.Driver):
    """A driver that gives each allocation new addresses and checks the addresses in launches."""

    room = mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    first = end = ctypes.addressof(ctypes.c_char.from_buffer(room))
    n_named = 0

    def cuMemAlloc(self, nbytes):
        address, self.end = self.end, self.end + -(-(nbytes + 1) // PAGE) * PAGE
        self._memory[address] = None, nbytes
        return self._success[0], address

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        words, num_tokens, rank = counted_driver._arguments(function, arguments)
        starts = sorted(self._memory)

        def bytes_behind(address):
            at = bisect.bisect_right(starts, address) - 1
            return starts[at] + self._memory[starts[at]][1] - address if at >= 0 else 0

        for word in words:
            if self.first <= word < self.end:
                self.n_named += 1
                assert bytes_behind(word) > 0, f"{function} of rank {rank} names memory that is gone"
        if "move" not in function:  # of a rank's own memory, in which results are held
            events[rank].append((str(function), config.gridDimX, config.blockDimX, num_tokens))
        return (self.launch_result,)


class World(OneRankHere):
    """One of several ranks in this process; each has its own memory for all ranks."""

    def __init__(self, machine, rank):
        super().__init__(machine, RANKS)
        self.rank, self.ranks = rank, range(rank, rank + 1)
        self._streams = {rank: machine.stream(rank, handle=77 + rank)}

    def allocate(self, nbytes, name, regions, timeout):
        events[self.rank].append((name, nbytes))
        buffers = [self.machine.alloc(nbytes, name, rank) for rank in range(RANKS)]
        return SymmetricMemory(dict(enumerate(buffers)), [b.address for b in buffers])

    def barrier(self, occasion, timeout):
        events[self.rank].append(occasion)

    def stream_of(self, rank, fused=False):
        return self._streams[rank]


def told(buffer, shape, n_local_experts):
    """Replaces Buffer.told: what kernels would have reported, for a Buffer with a staging area."""
    counts = traffic.rows_matrix(shape, traffic.topk_ids(shape, RANKS)).ravel().tolist()
    buffer.want_tokens(shape.tokens)
    per_expert = np.zeros(n_local_experts, np.int64)
    if not buffer.pool_layout.staging_bytes:
        raise Again
    return 0, tuple(counts), per_expert


def run(case, worlds, driver):
    """Run the case's iterations on all ranks, and leave nothing."""
    Buffer.told = lambda buffer, i, n_local, interface: told(buffer, case.shape, n_local)
    before = set(driver.allocated())
    made, held = [case.make(world) for world in worlds], defaultdict(list)
    for i in range(ITERATIONS):
        driver.capture = 7 if i in CAPTURED and getattr(made[0], "capturable", True) else 0
        for phase in made[0].phases:
            for rank in random.sample(range(RANKS), RANKS):
                disturb(worlds[rank], held[rank])
                made[rank].launch(phase)
                if random.random() < 0.05:
                    held[rank].append((getattr(made[rank], "handle", None), getattr(made[rank], "result", None)))
    driver.capture = 0
    held.clear()
    for contender in made:
        contender.check()
        contender.close()
    gc.disable()  # remaining objects may not wait for it
    del made, contender
    left = set(driver.allocated()) - before
    gc.enable()
    assert not left, f"{case.kernels} at {case.shape} leaves {left}"
    for rank in range(1, RANKS):
        assert events[rank] == events[0], (case.kernels, str(case.shape), rank)
    n = len(events[0])
    events.clear()
    return n


def disturb(world, held):
    """Do something on one rank and not on the others."""
    if random.random() < 0.05:
        gc.set_threshold(random.randint(1, 60), random.randint(1, 5), random.randint(1, 3))
    if random.random() < 0.02:
        gc.collect()
    if random.random() < 0.02:
        world.machine.alloc(PAGE, "other").free()
    if random.random() < 0.2:
        held.clear()


def main(seed="1", seconds="0"):
    random.seed(int(seed))
    counted_driver.Driver = Driver
    machine, driver = counted_driver.counted_machine(RANKS, 0)
    machines = [machine, *(gpu_machine.GpuMachine(RANKS, rank=rank) for rank in range(1, RANKS))]
    worlds = [World(machine, rank) for rank, machine in enumerate(machines)]
    began, n = time.monotonic(), 0
    while not n or time.monotonic() - began < float(seconds):
        for text in ("16", "160:zipf", "1", "1024:zipf", "16:fp8"):
            tokens, _, more = text.partition(":")
            shape = shapes.parse(f"{tokens}x{HIDDEN}/{EXPERTS}" + f":{more}" * bool(more))
            for section in ("fused", "split", "rows", "expert-major"):
                if shape.tokens <= 160 or section == "expert-major":
                    n += sum(run(case, worlds, driver) for case in plan._at(section, shape, 24))
    print(f"{n} launches and meetings of each rank, all alike; {driver.n_named} addresses")


if __name__ == "__main__":
    main(*sys.argv[1:])
