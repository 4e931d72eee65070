"""One rank that adds to words in another rank's window, while all others do the same; no addition may be lost.

Argument: how many additions each rank makes to each word.
"""

import sys

import numpy as np

from epmoe import MPIWorld
from epmoe.device import atomic_add_acq_rel_sys_u64, kernel, red_add_release_sys_i32


@kernel
def add(words, n, rank):
    for _ in range(n):
        red_add_release_sys_i32(words, 1)
        atomic_add_acq_rel_sys_u64(words + 8, 1)


def main(n):
    world = MPIWorld()
    memory = world.allocate(256, "words", [("words", 0, (32,), "u8", ("word",))], 30)
    buffer = memory.buffers[world.rank]
    buffer.fill(0)
    world.barrier("start", 30)
    world.machine.launch(add, 1, 32, (memory.addresses[0], n, world.rank), stream=world.stream_of(world.rank))
    world.machine.synchronize()
    world.barrier("leaving", 30)
    if world.rank == 0:
        low, high = buffer.read(np.int32, ()), buffer.read(np.uint64, (), 8)
        print(f"counted {low} and {high} of {32 * n * world.n_ranks}\n", end="", flush=True)
    world.barrier("leaving", 30)


main(int(sys.argv[1]))
