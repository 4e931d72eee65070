"""A kernel before an exact call stores to an address that is nobody's: prints the error that the call raises.

`python broken_kernel_program.py rows|experts|trimmed`, on a GPU; test_telling.py runs it.
"""

import os
import sys
import time

import ml_dtypes
import numpy as np

from epmoe import EPConfig, ExpertParallel, LocalWorld, fused_a2a
from epmoe.device import globaltimer, kernel, store_u32, u32, u64
from epmoe.host.arrays import Array
from epmoe_ref.errors import EPError

X, IDS = np.zeros((2, 16), ml_dtypes.bfloat16), np.zeros((2, 1), np.int64)
PROBS, MAPS = np.ones((2, 1), np.float32), np.ones((2, 4), bool)


@kernel(max_threads=32, words=1)
def break_off(params, n, my_rank):
    """Runs for 100 ms, and stores to address 16."""
    (address,) = params
    since = u64(globaltimer())
    while u64(globaltimer()) - since < u64(100_000_000):
        pass
    store_u32(address, u32(1))


def main(call):
    world = LocalWorld(1)
    machine = world.machine

    def on_device(array):
        """Arrays in host memory would be waited for earlier, when they are copied."""
        buffer = machine.alloc(array.nbytes, "input")
        buffer.write(array)
        return [Array(None, buffer.address, array.shape, array.dtype, None, None, buffer)]

    x, ids, probs, maps = map(on_device, (X, IDS, PROBS, MAPS))
    ep = ExpertParallel(EPConfig(1, 4, 1, 16, 4), world)

    def exact():
        if call == "rows":
            return fused_a2a.fused_dispatch(x, ids, probs, 4, world)
        if call == "experts":
            return fused_a2a.hybrid_ep_dispatch(x, maps, None, world, 4)
        (d,) = ep.dispatch(x, ids)
        d.trimmed()
        return ep.combine([d.output_tokens], [d], probs)

    exact()
    machine.prepare(break_off)
    machine.launch(break_off, 1, 32, ((16,), 0, 0), stream=world.stream_of(0))
    begin = time.monotonic()
    try:
        exact()
    except EPError as error:
        assert time.monotonic() - begin > 0.05, "the error came before the host waited"
        print(type(error).__name__, error, flush=True)
    os._exit(0)  # nothing can be freed any more


if __name__ == "__main__":
    main(*sys.argv[1:])
