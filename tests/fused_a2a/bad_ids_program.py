"""Two ranks, an exact dispatch with room for too few rows, and bad ids that only rank 0's device sees.

Rank 0 raises the error, after it has called again with rank 1. Then both go on.
"""

from unittest.mock import patch

import ml_dtypes
import numpy as np

from epmoe import MPIWorld, fused_a2a
from epmoe_ref.errors import EPValueError

group = MPIWorld(timeout=10.0)


def dispatch(num_tokens, bad=False):
    x, ids = np.ones((num_tokens, 16), ml_dtypes.bfloat16), np.zeros((num_tokens, 1), np.int64)
    if bad:
        ids[0] = 7
    with patch("epmoe.host.inputs.check_ids"):
        made = fused_a2a.fused_dispatch(x, ids, np.ones((num_tokens, 1), np.float32), 4, group)
    return len(made[0])


dispatch(1)
try:
    print(f"rank {group.rank}: {dispatch(16, bad=group.rank == 0)} rows", flush=True)
except EPValueError as error:
    print(f"rank {group.rank} was told: {error}", flush=True)
print(f"rank {group.rank} went on: {dispatch(16)} rows", flush=True)
