"""epmoe_ref.fused_a2a for one rank of a large world: a handle cut to what that rank receives, or to what it gets back.

A reference function that is given a cut handle and the data of all ranks computes this rank's results alone, a list
with one entry.
"""

from dataclasses import replace

import numpy as np
from rows_group import BF16

from epmoe_ref import fused_a2a as reference

# over receiving ranks; the last one in a HybridHandle alone
RECEIVED = ("src_rank", "src_token", "local_expert")
VECTOR = 8  # elements in 16 bytes
PLACES = 2**16  # where a piece may begin


def receiving(handle, rank):
    """The handle for combine_backward and hybrid_combine_backward: rows that this rank receives."""
    return replace(handle, **{name: [getattr(handle, name)[rank]] for name in RECEIVED if hasattr(handle, name)})


def returning(handle, rank):
    """The handle for combine_forward and dispatch_backward, and those of hybrid: sums of this rank's tokens."""
    return replace(handle, row_of=[handle.row_of[rank]])


def rows_received(x, token_indices, token_probs, num_experts, rank):
    """reference.dispatch_forward's results of one rank, and its handle of all."""
    narrow = [a[:, :VECTOR] for a in x]
    _, ids, probs, per_expert, handle = reference.dispatch_forward(narrow, token_indices, token_probs, num_experts)
    (rows,) = reference.combine_backward(receiving(handle, rank), x)
    return (rows, ids[rank], probs[rank], per_expert[rank]), handle


def hybrid_received(x, routing_map, probs, num_local_experts, rank, **options):
    """reference.hybrid_dispatch_forward's results of one rank, without FP8, and its handle of all."""
    narrow = [a[:, :VECTOR] for a in x]
    _, row_probs, _, per_expert, handle = reference.hybrid_dispatch_forward(
        narrow, routing_map, probs, num_local_experts, **options
    )
    (rows,) = reference.hybrid_combine_backward(receiving(handle, rank), x)
    return (rows, row_probs[rank], None, per_expert[rank]), handle


def order_tells(rng, num_rows, hidden):
    """bfloat16 [rows, hidden] of each rank whose sums show in which order they were made.

    One element of eight is 2**30 or -2**30, which swallows what was added before it and cancels with others. Rows are
    pieces of one random line, from anywhere in it: quicker than new numbers for each.
    """
    bits = rng.integers(0, 2**16, hidden + PLACES, np.uint16)
    small = bits & 0x83FF | 0x3C00  # magnitudes from 2**-7 to 2
    line = np.where((bits & 0x1C00) == 0, bits & 0x8000 | 0x4E80, small).view(BF16)
    pieces = np.lib.stride_tricks.sliding_window_view(line, hidden)
    return [pieces[rng.integers(0, PLACES, n)] for n in num_rows]
