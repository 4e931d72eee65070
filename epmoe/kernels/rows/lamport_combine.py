"""Combine in Lamport rows: as in tagged_combine.py, but that some blocks push, and others add up what comes.

Polls of a multiprocessor wait in line behind its own stores.
"""

from epmoe.device import block_idx, device_fn, grid_dim, i32, n_warps, u32

from . import lamport, tagged_combine
from .row_copy import VECTOR, fewest_parts
from .status import ROWS_COMBINE

TENTHS_PUSHING = 6      # of the blocks but the clerk
ALL_REDUCE = False      # whether blocks that have pushed all that they have reduce as well


def make(shape, block, of_block, meeting, mark):
    """As that of tagged_combine.py."""
    if not shape.lamport:
        return tagged_combine.never
    words, (senders, pushes, first_block, reduces) = lamport.make(shape, block, ROWS_COMBINE), _blocks()
    push = tagged_combine.pushing(shape, block, words, senders, fewest_parts(shape.row_bytes // VECTOR))
    reduce = tagged_combine.reducing(shape, block, words, first_block)
    return tagged_combine.combining(push, pushes, reduce, reduces, of_block, meeting, mark)


def _blocks():
    """Device functions: senders() -> (blocks that push, warps of each), pushes(), first_block(), reduces()."""
    tenths, all_reduce = TENTHS_PUSHING, ALL_REDUCE

    @device_fn
    def pushing():
        return i32(max(1, i32(u32(i32((grid_dim() - 1) * tenths)) // u32(10))))

    @device_fn
    def senders():
        return pushing(), i32(n_warps())

    @device_fn
    def pushes():
        return block_idx() < pushing()

    @device_fn
    def first_block():
        first = pushing()
        if all_reduce or first >= grid_dim() - 1:
            first = i32(0)
        return first

    @device_fn
    def reduces():
        return block_idx() >= first_block()

    return senders, pushes, first_block, reduces
