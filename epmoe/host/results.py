"""Arrays that the caller gives with out=, for a kernel to write one rank's results into.

They share no memory: not with themselves, not with each other, not with inputs.
"""

import numpy as np

from epmoe.host import inputs
from epmoe_ref.errors import EPValueError

MAX_WORK = 10_000  # of NumPy's exact search; what takes longer counts as overlapping


class Out:
    """Addresses for the kernel; arrays in host memory are filled by `finish`.

    arrays: {name: the caller's array}, each with exactly the result's shape and dtype; shapes: {name: shape} where a
    result is smaller than the lent memory's array. named: (what it is, for messages; Array) of each.
    """

    def __init__(self, loan, machine, rank, arrays, shapes=None):
        self.loan, self.arrays, self._seen = loan, arrays, {}
        for name, array in arrays.items():
            field = loan.fields[name]
            shape = (shapes or {}).get(name, field.shape)
            what = f"out: {name} of rank {rank}"
            self._seen[name] = inputs.result(machine, array, shape, field.dtype, what)
        self.named = [(f"out: {name} of rank {rank}", a) for name, a in self._seen.items()]
        self._filled = [name for name, a in self._seen.items() if a.host is not None]

    def address(self, name):
        """Where the kernel writes the array of that name: device arrays directly, others in lent memory."""
        if name in self._seen and name not in self._filled:
            return self._seen[name].address
        return self.loan.address(name)

    def finish(self, engine):
        """Wait for the kernels, and copy results into the caller's host arrays, if there are any."""
        if not self._filled:
            return
        engine.check()
        for name in self._filled:
            given, field = self._seen[name].host, self.loan.fields[name]
            raw = self.loan.buffer.read(np.uint8, (given.nbytes,), field.offset)
            given[...] = raw.view(field.dtype).reshape(given.shape)


def expect_apart(outs, inputs=()):
    """Raise EPValueError if an array that is written overlaps itself, another one, or an input.

    outs, inputs: pairs (what it is, for messages; Array). Inputs in host memory are copied before anything is written.
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
    """(first byte, behind the last byte) of an Array's elements."""
    if 0 in a.shape:
        return a.address, a.address
    steps = a.strides
    if steps is None:
        return a.address, a.address + int(np.prod(a.shape, dtype=np.int64)) * a.dtype.itemsize
    ends = [(n - 1) * s for n, s in zip(a.shape, steps)]
    return (
        a.address + sum(e for e in ends if e < 0),
        a.address + sum(e for e in ends if e > 0) + a.dtype.itemsize,
    )


def _overlaps_itself(a):
    """Whether two elements may share a byte: an axis steps less far than those within it reach."""
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
