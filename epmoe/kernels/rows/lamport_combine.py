"""Combine in Lamport rows: as in tagged_combine.py, in vectors instead of words, and all warps of a block push."""

from epmoe.device import device_fn, grid_dim, i32, n_warps

from . import lamport, tagged_combine
from .row_copy import VECTOR, fewest_parts
from .status import ROWS_COMBINE


def make(shape, block, of_block, meeting, mark):
    """As that of tagged_combine.py."""
    if not shape.lamport:
        return tagged_combine.never
    words = lamport.make(shape, block, ROWS_COMBINE)
    push = tagged_combine.pushing(shape, block, words, _all_warps, fewest_parts(shape.row_bytes // VECTOR))
    return tagged_combine.combining(push, tagged_combine.reducing(shape, block, words), of_block, meeting, mark)


@device_fn
def _all_warps():
    return i32(grid_dim() - 1), i32(n_warps())
