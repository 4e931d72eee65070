"""Arrays that the caller gives with out=, into which kernels write one rank's results."""

import numpy as np

from epmoe.host import inputs
from epmoe.host.arrays import to_numpy
from epmoe.host.dlpack import numpy_at
from epmoe_ref.errors import EPValueError

MAX_WORK = 10_000  # limit of NumPy's exact search; arrays that need more count as overlapping


class Out:
    """Gives the kernel addresses of the caller's arrays; `finish` fills those in host memory.

    arrays: {name: the caller's array}, each with exactly the result's shape and dtype. shape: the result's, if it is
    smaller than the lent array. named: {name: (name for messages, Array)}.
    """

    def __init__(self, loan, machine, rank, arrays, shape=None):
        self.loan, self.arrays, self.named = loan, arrays, {}
        for name, array in arrays.items():
            field, what = loan.fields[name], f"out: {name} of rank {rank}"
            self.named[name] = what, inputs.result(machine, array, shape or field.shape, field.dtype, what)

    def address(self, name):
        """Address where the kernel writes that array: the caller's device array, or else lent memory."""
        _, given = self.named.get(name, (None, None))
        return self.loan.address(name) if given is None or given.host is not None else given.address

    def finish(self, engine):
        """Wait for the kernels, and copy results into the caller's host arrays, if there are any."""
        on_host = {name: given.host for name, (_, given) in self.named.items() if given.host is not None}
        if on_host:
            engine.check()
        for name, host in on_host.items():
            host[...] = to_numpy(self.loan.array(name, len(host)))


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


def _overlaps_itself(a):
    """Whether two elements may share a byte: the stride of an axis is less than the extent of the axes within it."""
    reach = a.dtype.itemsize
    for step, n in sorted((abs(s), n) for s, n in zip(a.strides, a.shape) if n > 1):
        if step < reach:
            return 0 not in a.shape
        reach += step * (n - 1)
    return False


def _share_memory(a, b):
    # only addresses are compared, since the host cannot read GPU memory
    both = [numpy_at(x.address, x.shape, x.dtype, x.strides) if x.host is None else x.host for x in (a, b)]
    try:
        return np.shares_memory(*both, max_work=MAX_WORK)
    except np.exceptions.TooHardError:
        return True
