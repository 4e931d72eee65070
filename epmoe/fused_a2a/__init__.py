"""Megatron-Core's `fused_a2a`: its names, signatures and shapes, over a world of epmoe.

`group` is a LocalWorld (arguments and results that differ between ranks are lists over ranks), or an MPIWorld or a
ShmemWorld of one p2p world (this rank's arrays). Arguments are arrays of NumPy, or of torch or CuPy, which are not
copied. Results are NumPy arrays in the simulator, and DeviceArray on a GPU. Arrays in GPU memory must be C-contiguous;
others are refused, and the error names the remedy (epmoe.torch copies them). Arrays in host memory may have any
strides. `ctx` is any object with attributes; Context is one. Results equal `epmoe_ref.fused_a2a`'s bit for bit.

You may keep a result or a handle as long as you like; a later call reuses the memory of dropped ones. Calls on a group
are collective: every rank makes the same calls in the same order, with the same hidden size, dtype, top_k and number of
experts, and with at least 64 SMs on all ranks or on none. The ranks compare these the first time they occur. If ranks
later mix what they have compared before, a PeerTimeout says which rank gave what. Rows of equal bytes (bf16 [T, 16] and
float32 [T, 8]) are not told apart. Only one thread may call at a time; otherwise EPStateError.
"""

from epmoe.fused_a2a.arguments import get_hidden_bytes
from epmoe.fused_a2a.buffer import Buffer
from epmoe.fused_a2a.buffers import (
    Context,
    get_buffer,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
    set_deepep_num_sms,
)
from epmoe.fused_a2a.fused import (
    FusedCombine,
    FusedDispatch,
    FusedDispatchOnDevice,
    fused_combine,
    fused_dispatch,
    fused_dispatch_on_device,
)
from epmoe.fused_a2a.hybrid_ep import HybridEPCombine, HybridEPDispatch, hybrid_ep_combine, hybrid_ep_dispatch

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
