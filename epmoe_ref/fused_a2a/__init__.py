"""Megatron-Core's `fused_a2a`, defined exactly, for all ranks at once.

Arguments and results that differ between ranks are lists over ranks. The number of ranks is the length of these lists.
One handle serves all ranks. There are two families of functions:

`dispatch_*`, `combine_*` (FusedDispatch, FusedCombine): a token is sent once to each rank that has one of its experts;
rows by src_rank, then token; gradients are sums over ranks.
`hybrid_dispatch_*`, `hybrid_combine_*` (HybridEPDispatch, HybridEPCombine): a token has one row for each of its
experts; rows by local expert, then src_rank, then token, padded; gradients are sums over experts, then over ranks.

R ranks, E = `num_experts` global experts, L = E / R local ones, T tokens on a rank (0 is allowed, ranks may differ),
K experts a token, H hidden, N rows received by a rank, P rows of an expert-major result. Rank e // L owns expert e.

Every sum starts from +0.0, runs in ascending order (rank, expert) in float32, and is rounded (nearest, ties to even)
exactly where the docstrings say so. So every bit of a result is defined, except the sign and payload of a NaN that a sum
has produced. Forward moves bytes, so a NaN arrives unchanged.

A backward takes the gradients from the next operation. Backward and combine may be called any number of times with one
handle.

Source: the core.transformer.moe.fused_a2a page of Megatron-Core r0.16 (docs/pages.md).
"""

from .arguments import get_hidden_bytes
from .hybrid import hybrid_combine_backward, hybrid_combine_forward, hybrid_dispatch_backward, hybrid_dispatch_forward
from .hybrid_handle import HybridHandle
from .rows import combine_backward, combine_forward, dispatch_backward, dispatch_forward
from .rows_handle import RowsHandle

__all__ = [
    "HybridHandle",
    "RowsHandle",
    "combine_backward",
    "combine_forward",
    "dispatch_backward",
    "dispatch_forward",
    "get_hidden_bytes",
    "hybrid_combine_backward",
    "hybrid_combine_forward",
    "hybrid_dispatch_backward",
    "hybrid_dispatch_forward",
]
