"""Two ranks, of which one makes another HybridEP call, or none: both go on after reset_hybrid_ep_buffer."""

import ml_dtypes
import numpy as np

from epmoe import MPIWorld
from epmoe.fused_a2a import hybrid_ep_combine, hybrid_ep_dispatch, reset_hybrid_ep_buffer
from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe_ref.errors import EPStateError, PeerTimeout

world = MPIWorld(timeout=20.0)


def round_of(num_permuted_tokens=None, columns=16):
    x, maps = np.ones((3, columns), ml_dtypes.bfloat16), np.ones((3, 4), bool)
    options = dict(num_permuted_tokens=num_permuted_tokens)
    rows, *_, handle = hybrid_ep_dispatch(x, maps, None, world, 2, **options)
    return np.asarray(hybrid_ep_combine(rows, handle), np.float32).sum()


round_of()
for of_rank_0, of_rank_1 in ((), (20,)), ((), None), ((None, 32), None):
    arguments = of_rank_1 if world.rank else of_rank_0
    hybrid_ep_buffer(world).timeout = 0.3
    for expected in PeerTimeout, EPStateError:
        try:
            if arguments is not None:
                round_of(*arguments)
        except expected as error:
            print(f"rank {world.rank} was told: {error}\n", end="", flush=True)
    hybrid_ep_buffer(world).timeout = 20.0
    reset_hybrid_ep_buffer(world)
    print(f"rank {world.rank} went on: {round_of()}\n", end="", flush=True)
