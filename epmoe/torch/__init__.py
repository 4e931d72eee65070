"""Megatron-Core's `fused_a2a` for torch: the names of `epmoe.fused_a2a` as autograd Functions over tensors.

    from epmoe.torch import fused_combine, fused_dispatch       # instead of megatron.core.transformer.moe.fused_a2a

`group` is a process group of torch.distributed on one host, or a world of epmoe. With a process group or an MPIWorld
every tensor is this rank's own; with a LocalWorld whatever differs per rank is a list over ranks, and gradients flow
through every tensor in the lists. On a GPU nothing is copied: kernels read the caller's tensors, and results are
tensors over epmoe's memory, which lives as long as they do. Kernels run in the order of torch's current stream. CPU
tensors are used in place by the simulator.

Streams: a world has one, torch's default stream unless you pass another. Results of calls on that stream are not
copied. Their memory is lent again once they are dropped. torch's record_stream and resize_ do not work on it, so keep a
result as long as another stream reads it. Results of calls on any other stream are copied into torch's own memory.

For numbers, shapes and errors see `epmoe.fused_a2a`. torch.compile compiles the code before and after these functions.
Only this package imports torch.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    from epmoe.provenance import install

    raise ImportError(f"epmoe.torch needs torch: {install('torch')}") from error

from epmoe.fused_a2a import get_hidden_bytes, set_deepep_num_sms
from epmoe.torch.buffers import get_buffer, init_hybrid_ep_buffer, reset_hybrid_ep_buffer
from epmoe.torch.fused import (
    FusedCombine,
    FusedDispatch,
    FusedDispatchOnDevice,
    fused_combine,
    fused_dispatch,
    fused_dispatch_on_device,
)
from epmoe.torch.hybrid_ep import HybridEPCombine, HybridEPDispatch, hybrid_ep_combine, hybrid_ep_dispatch
from epmoe.torch.process_group import ProcessGroupWorld

HAVE_DEEP_EP = HAVE_HYBRIDEP = True  # as Megatron asks for them

__all__ = [
    "FusedCombine",
    "FusedDispatch",
    "FusedDispatchOnDevice",
    "HybridEPCombine",
    "HybridEPDispatch",
    "ProcessGroupWorld",
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
