"""The table of all intrinsics, and the common parts of memory accesses: widths, scopes, bounds.

Every access is a step of the scheduler (it may switch threads), is checked for bounds and alignment, and is passed to the
race detector if there is one. plain_ops and strong_ops make accesses with factories, because they differ only in width,
order and scope.
"""

import struct

import numpy as np
from greenlet import getcurrent

from .memory import MEMORY, out_of_bounds
from .scheduler import NOW

MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
SCOPES = {"cta": 1, "gpu": 2, "sys": 3}
STARTS, SPANS = MEMORY.starts, MEMORY.spans
read4, write4 = struct.Struct("=4I").unpack_from, struct.Struct("=4I").pack_into
OPS = {}


def intrinsic(op, name=None, doc=None):
    """Register an operation in the table, under its name."""
    op.__name__ = op.__qualname__ = name or op.__name__
    if doc:
        op.__doc__ = doc
    OPS[op.__name__] = op
    return op


def step():
    """Count an operation, which may switch threads. Returns the current thread. The most frequent ones inline it."""
    NOW.fuel -= 1
    if NOW.fuel < 0:
        NOW.preempt()
    return getcurrent()


def _to_i32(v):
    return (int(v) + 0x80000000 & MASK32) - 0x80000000


def _to_u32(v):
    return int(v) & MASK32


def _to_u64(v):
    return int(v) & MASK64


def _to_u16(v):
    return int(v) & 0xFFFF


def _to_u8(v):
    return int(v) & 0xFF


WRAP = {"u8": _to_u8, "u16": _to_u16, "i32": _to_i32, "u32": _to_u32, "u64": _to_u64, "f32": np.float32}


def span_of(address, nbytes, name, alignment=None, write=False):
    """The span that holds these bytes. If none does, raises an error with the kernel's line, buffer and index."""
    alignment, span = alignment or nbytes, MEMORY.find(address, nbytes)
    if span is None or address % alignment:
        complaint = MEMORY.complaint(address, alignment)
    elif write and span.readonly:
        complaint = "%s is read-only" % span.describe(address)
    else:
        return span
    raise out_of_bounds("%s (%d bytes)" % (name, nbytes), getcurrent().place(), complaint)
