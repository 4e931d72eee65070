"""dispatch_kernel, combine_async_kernel and combine_wait_kernel with the pages' arguments, over hand-made buffers.

Two ranks in one process: on a CPU with EPMOE_DEVICE=sim, else both on one GPU. Experts return their rows as they are.
"""

import ml_dtypes
import numpy as np

from epmoe import (
    EPConfig,
    EPLocalSyncCounters,
    combine_async_kernel,
    combine_wait_kernel,
    device,
    dispatch_kernel,
)

cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=64, max_tokens_per_rank=8)
local, msg_bytes, rows = cfg.n_local_experts, cfg.format.msg_size(), 2 * 8 * 2
MAX_FINITE = np.uint64(2**64 - 1)
machine = device.machine(cfg.n_ranks)
if device.SIM:
    to_device, to_host = np.array, np.array
else:
    from numba import cuda

    to_device, to_host = cuda.to_device, lambda array: array.copy_to_host()


def each(shape, dtype, value=0):
    """An array for each rank, and its address on each rank."""
    made = [to_device(np.full(shape, value, dtype)) for _ in range(cfg.n_ranks)]
    return made, tuple(machine.adopt(array, "buffer", rank) for rank, array in enumerate(made))


ids = [np.array([[0, 3], [2, 1], [1, -1]], np.int32), np.array([[3, 2]], np.int32)]
x = [
    np.arange(len(i) * 64).reshape(-1, 64).astype(ml_dtypes.bfloat16).view(np.uint16) for i in ids
]  # bf16 bits
input_tokens, topk_ids = [list(map(to_device, a)) for a in (x, ids)]
output_tokens, _ = each((rows, 64), np.uint16)
row_offsets, expert_ids, src_info = (
    each(s, t)[0] for s, t in ((3, np.uint32), (2, np.int32), ((rows, 2), np.int32))
)
send_buf, send_p = each((8, msg_bytes), np.uint8)
recv_buf, recv_buf_ptrs = each((local, 2, 8, msg_bytes), np.uint8)
recv_count, recv_count_ptrs = each((local, 2), np.uint64, MAX_FINITE)
returned, returned_ptrs = each((8, 2, 128), np.uint8)
counted, counted_ptrs = each((local, 2), np.uint64, MAX_FINITE)
counters, _ = each(EPLocalSyncCounters[cfg.n_experts].total_size(), np.int32)
combined = [to_device(np.zeros_like(a)) for a in x]

dispatch, send_back = dispatch_kernel(cfg), combine_async_kernel(cfg)
wait = combine_wait_kernel(
    cfg, router_weights_wrapper=lambda token, k: 0.5, n_experts=4, top_k=2, msg_bytes=128
)
streams = [machine.stream(rank) for rank in range(2)]
with machine.hold():
    for r, stream in enumerate(streams):
        ep_counters = EPLocalSyncCounters[cfg.n_experts](counters[r])
        dispatch[4, 64, stream](
            input_tokens[r],
            topk_ids[r],
            dict(output_tokens=output_tokens[r]),
            row_offsets[r],
            expert_ids[r],
            src_info[r],
            send_p[r],
            recv_buf_ptrs,
            recv_count_ptrs,
            ep_counters,
            r,
        )
        send_back[4, 64, stream](
            output_tokens[r], src_info[r], 0, returned_ptrs, counted_ptrs, ep_counters, r
        )
        wait[4, 64, stream](
            combined[r], returned_ptrs[r], counted_ptrs[r], ep_counters, r, topk_ids[r]
        )
for kernel in (dispatch, send_back, wait):
    kernel.check()
for r in range(2):
    weight = 0.5 * (ids[r] >= 0).sum(axis=1, keepdims=True).astype(np.float32)
    right = (weight * x[r].view(ml_dtypes.bfloat16).astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert (to_host(combined[r]) == right.view(np.uint16)).all()
    print(f"rank {r}: row_offsets {to_host(row_offsets[r]).tolist()}, every token came back")
