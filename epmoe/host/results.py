"""Where a kernel writes one rank's results if the caller gave arrays with out=; else that is a Loan alone."""

import numpy as np

from epmoe.host import inputs


class Results:
    """Addresses for the kernel and, afterwards, the arrays for the caller.

    out: {name: the caller's array}, each with exactly the result's shape and dtype. Device arrays are written directly;
    host arrays are filled by `finish`, which needs the kernels to have ended.
    """

    def __init__(self, loan, machine, rank, out, shapes=None):
        self.loan, self._out, self._given = loan, out, {}
        for name, array in self._out.items():
            shape = (shapes or {}).get(name, loan.fields[name].shape)
            what = f"out: {name} of rank {rank}"
            self._given[name] = inputs.result(machine, array, shape, loan.fields[name].dtype, what)
        self.given = bool(self._given)  # whether some results go into arrays of the caller
        self.outs = [(f"out: {name} of rank {rank}", array) for name, array in self._given.items()]

    def address(self, name):
        """Where the kernel writes the array of that name."""
        given = self._given.get(name)
        return (
            given.address if given is not None and given.host is None else self.loan.address(name)
        )

    def array(self, name, n=None):
        """The caller's own array, or one of the lent memory cut to n entries; None if the result has no such array."""
        if name in self._out:
            return self._out[name]
        return self.loan.array(name, n)

    def part(self, name, field):
        """The caller's own array, or the part of lent memory that is a Field."""
        return self._out[name] if name in self._out else self.loan.part(name, field)

    @property
    def copies(self):
        """Whether host arrays of the caller wait for `finish`."""
        return any(given.host is not None for given in self._given.values())

    def finish(self):
        """Copy results into the caller's host arrays; the kernels must have ended."""
        for name, given in self._given.items():
            if given.host is not None:
                field = self.loan.fields[name]
                raw = self.loan.buffer.read(np.uint8, (given.host.nbytes,), field.offset)
                given.host[...] = raw.view(field.dtype).reshape(given.shape)
