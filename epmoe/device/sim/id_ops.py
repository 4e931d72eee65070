"""Intrinsics for thread indices and time; the arithmetic intrinsics are the host's."""

from greenlet import getcurrent

from .. import arithmetic, names
from .ops import word
from .scheduler import NOW


@word
def thread_idx():
    """Index of the thread in its block."""
    return getcurrent().tid


@word
def block_idx():
    """Index of the block in the grid."""
    return getcurrent().block.index


@word
def block_dim():
    """Threads a block."""
    return getcurrent().launch.threads


@word
def grid_dim():
    """Blocks in the grid."""
    return getcurrent().launch.grid


@word
def lane_id():
    """Index of the thread in its warp, 0..31."""
    return getcurrent().lane


@word
def warp_id():
    """Index of the warp in its block."""
    return getcurrent().tid >> 5


@word
def n_warps():
    """Warps a block."""
    return (getcurrent().launch.threads + 31) >> 5


def _tick(ns):
    """A step that costs time but is not an operation: it does not interrupt a spin."""
    NOW.extra_ns += ns
    NOW.fuel -= 1
    NOW.mark -= 1
    if NOW.fuel < 0:
        NOW.preempt()


@word
def globaltimer():
    """Nanoseconds since some start; here 100 for each operation of any thread."""
    _tick(0)
    return NOW.nanoseconds()


@word
def clock():
    """Cycles of this multiprocessor since some start; here the same as globaltimer."""
    _tick(0)
    return NOW.nanoseconds()


@word
def nanosleep(ns):
    """Sleep for about ns nanoseconds."""
    _tick(int(ns))


for _name in " ".join([names.CASTS, names.NUMBERS, names.BITS]).split():
    word(getattr(arithmetic, _name))
