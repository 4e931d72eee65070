"""Two ranks grow in a call whose host does not wait, one more than the other: later calls of any size are right on both."""

import ml_dtypes
import numpy as np

from epmoe import MPIWorld, fused_a2a

world = MPIWorld(timeout=20.0)
buffer = fused_a2a.get_buffer(world, 0)
buffer.timeout = 10.0


def dispatched(function, num_tokens, hidden):
    """(x, results): every token goes to both ranks."""
    x = (np.arange(num_tokens * hidden).reshape(num_tokens, hidden) % 50).astype(ml_dtypes.bfloat16)
    ids, probs = np.tile([0, 2], (num_tokens, 1)), np.ones((num_tokens, 2), np.float32)
    return x, function(x, ids, probs, 4, world)


def round_trip(num_tokens, hidden):
    """A dispatch whose host waits, and a combine: the sum of two equal rows."""
    x, made = dispatched(fused_a2a.fused_dispatch, num_tokens, hidden)
    combined, _ = fused_a2a.fused_combine(np.asarray(made[0]), world, made[-1])
    assert (np.asarray(combined, np.float32) == 2 * np.asarray(x, np.float32)).all()


round_trip(3, 16)
round_trip(3, 256)  # now the pool has room for the rows of the next call
dispatched(fused_a2a.fused_dispatch_on_device, (12, 6)[world.rank], 16)
round_trip(2, 256)
for _ in range(2):
    round_trip(1, 16)
print(f"right sums, at most {buffer.max_tokens} tokens, {buffer.pool_layout}", flush=True)
