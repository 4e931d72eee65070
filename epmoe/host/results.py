"""Arrays that the caller gives with out=, for a kernel to write one rank's results into."""

import numpy as np

from epmoe.host import inputs


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
