"""Arrays that the caller gives with out=, into which kernels write one rank's results.

They must not overlap themselves, each other, or inputs.
"""

import numpy as np

from epmoe.host import inputs
from epmoe.host.arrays import c_strides
from epmoe_ref.errors import EPValueError

MAX_WORK = 10_000  # limit of NumPy's exact search; arrays that need more count as overlapping


class Out:
    """Gives the kernel addresses of the caller's arrays; `finish` fills those in host memory.

    arrays: {name: the caller's array}, each with exactly the result's shape and dtype. shape: the result's, if it is
    smaller than the lent array. named: (name for messages, Array) of each.
    """

    def __init__(self, loan, machine, rank, arrays, shape=None):
        self.loan, self.arrays, self._seen, self.named = loan, arrays, {}, []
        for name, array in arrays.items():
            field, what = loan.fields[name], f"out: {name} of rank {rank}"
            seen = inputs.result(machine, array, shape or field.shape, field.dtype, what)
            self._seen[name] = seen
            self.named.append((what, seen))
        self._filled = [name for name, a in self._seen.items() if a.host is not None]

    def address(self, name):
        """Address where the kernel writes that array: the caller's device array, or else lent memory."""
        if name in self._seen and name not in self._filled:
            return self._seen[name].address
        return self.loan.address(name)

    def finish(self, engine):
        """Wait for the kernels, and copy results into the caller's host arrays, if there are any."""
        if self._filled:
            engine.check()
        for name in self._filled:
            given, field = self._seen[name].host, self.loan.fields[name]
            raw = self.loan.buffer.read(np.uint8, (given.nbytes,), field.offset)
            given[...] = raw.view(field.dtype).reshape(given.shape)


def expect_apart(outs, inputs=()):
    """Raise EPValueError if an array that is written overlaps itself, another one, or an input.

    outs, inputs: pairs (name for messages, Array). Inputs in host memory may overlap: they are copied before any write.
    """
    inputs = [one for one in inputs if one[1].host is None]
    for i, (what, a) in enumerate(outs):
        if a.strides is not None and _overlaps_itself(a):
            raise EPValueError(
                f"{what} has strides {a.strides} bytes for shape {a.shape}, so that several elements lie "
                "in one place and results would overwrite each other: give an array of its own "
                "(np.empty, not broadcast_to, expand or as_strided)"
            )
        for other, b in (*outs[:i], *inputs):
            if _share_memory(a, b):
                raise EPValueError(
                    f"{what} and {other} share memory, so results would overwrite what is still needed: "
                    "give each an array of its own"
                )


def _extent(a):
    """(address of the first byte, address after the last byte) of an Array's elements."""
    if 0 in a.shape:
        return a.address, a.address
    strides = a.strides or c_strides(a.shape, a.dtype.itemsize)
    reach = [(n - 1) * s for n, s in zip(a.shape, strides)]
    first, last = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return a.address + first, a.address + last + a.dtype.itemsize


def _overlaps_itself(a):
    """Whether two elements may share a byte: the stride of an axis is less than the extent of the axes within it."""
    reach = a.dtype.itemsize
    for step, n in sorted((abs(s), n) for s, n in zip(a.strides, a.shape) if n > 1):
        if step < reach:
            return 0 not in a.shape
        reach += step * (n - 1)
    return False


def _share_memory(a, b):
    (a_first, a_end), (b_first, b_end) = _extent(a), _extent(b)
    if a_first >= b_end or b_first >= a_end or a_first == a_end or b_first == b_end:
        return False
    if a.host is None or b.host is None:
        return True
    try:
        return np.shares_memory(a.host, b.host, max_work=MAX_WORK)
    except np.exceptions.TooHardError:
        return True
