"""Megatron-Core's `fused_a2a`, said exactly, over a world at once.

Whatever differs from rank to rank is a list over ranks, arguments and results alike; one handle serves the world. The
number of ranks is the length of those lists. Two families of functions:

`dispatch_*`, `combine_*` (FusedDispatch, FusedCombine): a token travels once to each rank that has one of its experts;
rows by src_rank, then token; gradients are sums over ranks.
`hybrid_dispatch_*`, `hybrid_combine_*` (HybridEPDispatch, HybridEPCombine): a token has one row for each of its
experts; rows by local expert, then src_rank, then token, padded; gradients are sums over experts, then over ranks.

R ranks, E = `num_experts` global experts, L = E / R local ones, T tokens on a rank (0 is allowed, ranks may differ),
K slots, H hidden, N rows received by a rank, P rows of an expert-major result. Expert e lives on rank e // L.

Every sum starts from +0.0, runs in ascending order (rank, expert) in float32, and is rounded (nearest, ties to even)
exactly where the docstrings say so. Results are therefore defined to the bit; only the sign and the payload of a NaN
that a sum has produced are not. Forward moves bytes, so a NaN that was dispatched arrives unchanged.

A backward takes the gradients that the next operation gave, and may be called any number of times with one handle, as
may combine: a handle is never used up.

Source: the core.transformer.moe.fused_a2a page of Megatron-Core r0.16 (docs/pages.md).
"""

from .arguments import get_hidden_bytes
from .hybrid import (
    hybrid_combine_backward,
    hybrid_combine_forward,
    hybrid_dispatch_backward,
    hybrid_dispatch_forward,
)
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
