"""Megatron-Core's `fused_a2a`: its names, signatures and shapes, over a world of epmoe.

`group` is a LocalWorld (every argument and result that differs per rank is a list over ranks), or an MPIWorld or a
ShmemWorld of one p2p world (this rank's own arrays). Arrays come in as NumPy, or from torch and CuPy without a copy;
results are NumPy arrays in the simulator, DeviceArray on a GPU. Arrays in GPU memory must be C-contiguous, or they are
refused with the remedy (epmoe.torch copies them); those in host memory may have any strides. `ctx` is any object with attributes; Context is one.
Numbers are those of `epmoe_ref.fused_a2a`, to the bit.

A result and a handle may be kept as long as one likes; what nobody keeps a later call may return again. Calls on a
group are collective: every rank makes the same ones, in the same order, with the same hidden size, dtype, top_k and
number of experts. The ranks compare these when they are new. Ranks that later mix sizes that all of them know get a
PeerTimeout that says which rank gave what. Where the sizes in bytes are equal (bf16 [T, 16] beside float32 [T, 8]) such a
mix goes unnoticed. One thread at a time may call: EPStateError.
"""

from epmoe.fused_a2a.arguments import get_hidden_bytes
from epmoe.fused_a2a.buffer import Buffer
from epmoe.fused_a2a.buffers import (
    get_buffer,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
    set_deepep_num_sms,
)
from epmoe.fused_a2a.context import Context
from epmoe.fused_a2a.fused import (
    FusedCombine,
    FusedDispatch,
    FusedDispatchOnDevice,
    fused_combine,
    fused_dispatch,
    fused_dispatch_on_device,
)
from epmoe.fused_a2a.hybrid_ep import (
    HybridEPCombine,
    HybridEPDispatch,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
)

__all__ = [
    "Buffer",
    "Context",
    "FusedCombine",
    "FusedDispatch",
    "FusedDispatchOnDevice",
    "HybridEPCombine",
    "HybridEPDispatch",
    "fused_combine",
    "fused_dispatch",
    "fused_dispatch_on_device",
    "get_buffer",
    "get_hidden_bytes",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "reset_hybrid_ep_buffer",
    "set_deepep_num_sms",
]
