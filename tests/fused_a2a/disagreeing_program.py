"""Two ranks that give a fused_a2a call different things: each says which rank has what, and both can go on.

Arguments: what differs; "mpi" or "torch"; "known" if both ranks have called with both before.
"""

import sys

import ml_dtypes
import numpy as np

from epmoe import fused_a2a
from epmoe.fused_a2a.buffers import buffer_of
from epmoe_ref.errors import EPValueError, PeerTimeout

what, kind, *known = sys.argv[1:]


def world():
    if kind == "mpi":
        from epmoe import MPIWorld

        return MPIWorld(timeout=20.0)
    import torch.distributed as dist

    from epmoe.torch import ProcessGroupWorld

    dist.init_process_group("gloo")
    return ProcessGroupWorld(timeout=20.0)


def round_of(group, *, hidden=16, num_experts=4, dtype=ml_dtypes.bfloat16, top_k=1, experts_of_a_rank=2, sms=None):
    fused_a2a.set_deepep_num_sms(sms)
    x = np.ones((3, hidden), dtype)
    ids = np.tile(np.arange(top_k), (3, 1))
    rows, _, _, counts, handle = fused_a2a.fused_dispatch_on_device(
        x, ids, np.ones((3, top_k), np.float32), num_experts, group
    )
    out, _ = fused_a2a.fused_combine(rows, group, handle)
    maps = np.ones((3, group.n_ranks * experts_of_a_rank), bool)
    fused_a2a.hybrid_ep_dispatch(np.ones((3, hidden), ml_dtypes.bfloat16), maps, None, group, experts_of_a_rank)
    return np.asarray(out, np.float32).sum(), counts.sum()


OTHER = dict(hidden=4096, num_experts=400, dtype=np.float32, top_k=2, experts_of_a_rank=90, sms=1)
group = world()
if known:
    OTHER["hidden"] = 32
    for sizes in ({}, {what: OTHER[what]}):
        round_of(group, **sizes)
    buffer_of(group).timeout = 1.0
try:
    round_of(group, **({what: OTHER[what]} if group.rank == 1 else {}))
    print(f"rank {group.rank}: no error")
except (EPValueError, PeerTimeout) as error:
    print(f"rank {group.rank} was told: {error}", flush=True)
if known:
    buffer_of(group).timeout = 20.0
    buffer_of(group).reset()
total, counts = round_of(group)
print(f"rank {group.rank} went on: {total} {counts}", flush=True)
if kind == "torch":
    import torch.distributed as dist

    fused_a2a.get_buffer(group, 0).close()
    dist.destroy_process_group()
