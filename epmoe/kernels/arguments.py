"""The host's arguments for a kernel call: addresses, and the small tuples that go with them."""

from typing import NamedTuple

import numpy as np


class TokenArray(NamedTuple):
    """Address of an array of tokens [n, hidden] in device memory, and its number of tokens."""

    address: int
    n: int


class FormatHandler(NamedTuple):
    """A token format's output arrays: {name: address} for the format's output_fields, and their capacity in rows."""

    arrays: dict[str, int]
    capacity: int


class ScalarArg(NamedTuple):
    """A number given to a user's function (epilogue, router weights): dtype "float32" or "int32"."""

    value: float
    dtype: str

    @property
    def type(self):
        """The key of a compiled kernel: (dtype, number of axes, whether it may be written)."""
        return self.dtype, 0, False

    def words(self):
        """The words that it takes in the parameter block."""
        raw = np.zeros(1, np.uint64)
        raw.view(self.dtype)[0] = self.value
        return [int(raw[0])]


class ArrayArg(NamedTuple):
    """A C-contiguous array given to a user's function: address, shape of one or two axes, dtype.

    dtype is "float32" or "int32". writable: whether the function may store into it, which an output lambda does.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool = False

    @property
    def type(self):
        """The key of a compiled kernel: (dtype, number of axes, whether it may be written)."""
        return self.dtype, len(self.shape), self.writable

    def words(self):
        """The words that it takes in the parameter block: address, then lengths of the axes."""
        return [self.address, *self.shape]
