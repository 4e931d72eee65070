"""Intrinsics for thread indices and time. The arithmetic intrinsics are the host's."""

from greenlet import getcurrent

from .. import arithmetic, intrinsics
from .ops import intrinsic
from .scheduler import NOW


@intrinsic
def thread_idx():
    """Index of the thread in its block."""
    return getcurrent().tid


@intrinsic
def block_idx():
    """Index of the block in the grid."""
    return getcurrent().block.index


@intrinsic
def block_dim():
    """Threads a block."""
    return getcurrent().launch.threads


@intrinsic
def grid_dim():
    """Blocks in the grid."""
    return getcurrent().launch.grid


@intrinsic
def lane_id():
    """Index of the thread in its warp, 0..31."""
    return getcurrent().lane


@intrinsic
def warp_id():
    """Index of the warp in its block."""
    return getcurrent().tid >> 5


@intrinsic
def n_warps():
    """Warps a block."""
    return (getcurrent().launch.threads + 31) >> 5


def _tick(ns):
    """A step that costs time but is no operation. It does not interrupt a spin."""
    NOW.extra_ns += ns
    NOW.fuel -= 1
    NOW.mark -= 1
    if NOW.fuel < 0:
        NOW.preempt()


@intrinsic
def globaltimer():
    """Nanoseconds since some start. Here every operation of any thread takes 100."""
    _tick(0)
    return NOW.nanoseconds()


@intrinsic
def clock():
    """Cycles of this multiprocessor since some start. Here the same as globaltimer."""
    _tick(0)
    return NOW.nanoseconds()


@intrinsic
def nanosleep(ns):
    """Sleep for about ns nanoseconds."""
    _tick(int(ns))


for _name in " ".join([intrinsics.CASTS, intrinsics.NUMBERS, intrinsics.BITS]).split():
    intrinsic(getattr(arithmetic, _name))
