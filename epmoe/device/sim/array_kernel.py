"""Kernels that take arrays as arguments, in the simulator. An array is indexed with [], and every access is checked."""

import numpy as np
from greenlet import getcurrent

from epmoe_ref.errors import EPValueError

from .machine import Kernel, SimMachine
from .memory import MEMORY, VIEW, out_of_bounds
from .ops import OPS

TYPE_OF = {"uint8": "u8", "uint16": "u16", "int32": "i32", "uint32": "u32", "uint64": "u64", "float32": "f32"}


class SimArray:
    """An array argument inside a kernel: shape, and [] with one index for each axis, to load or store an element.

    Indices must not be negative: on a GPU they are not checked.
    """

    def __init__(self, address, shape, dtype, name):
        self.address, self.shape, self.name = address, tuple(int(n) for n in shape), name
        self.itemsize, self.dtype = np.dtype(dtype).itemsize, np.dtype(dtype).name
        ty = TYPE_OF.get(self.dtype)
        self._load, self._store = OPS.get("load_%s" % ty), OPS.get("store_%s" % ty)

    def _place(self, index):
        if self._load is None:
            raise EPValueError("%s holds %s: kernels take its address, not its elements" % (self.name, self.dtype))
        index, place = index if isinstance(index, tuple) else (index,), 0
        is_inside = len(index) == len(self.shape)
        for i, n in zip(index, self.shape):
            is_inside = is_inside and 0 <= i < n
            place = place * n + int(i)
        if not is_inside:
            raise out_of_bounds(
                "index [%s]" % ", ".join(map(str, index)),
                getcurrent().place(),
                "%s has shape %s" % (self.name, self.shape),
            )
        return self.address + place * self.itemsize

    def __getitem__(self, index):
        return self._load(self._place(index))

    def __setitem__(self, index, value):
        self._store(self._place(index), value)


def address_of(array):
    """Address (u64) of the first element of an array argument."""
    return array.address


class ArrayKernel(Kernel):
    """A kernel whose arguments are arrays, tuples and numbers. fn: the plain function. shmem: ignored here.

    An array is a record with host, address, shape, dtype (epmoe.host.arrays.Array).
    """

    def __init__(self, fn, max_threads, shmem=False):
        super().__init__(fn, max_threads)

    def stream_of(self, stream, n_ranks, rank):
        """A stream as it is; for None a stream of a new machine, whose launch runs at once, alone, to its end."""
        return SimMachine(n_ranks).stream(rank) if stream is None else stream

    def address(self, value, name, stream, rank):
        """The address of a pointer argument: a number, an array, or an object with `address`, `buffer` or `ptr`."""
        if getattr(value, "host", None) is not None:
            value = value.host
        for attribute in ("address", "buffer", "ptr"):
            value = getattr(value, attribute, value) if not isinstance(value, np.ndarray) else value
        if isinstance(value, np.ndarray):
            return _borrow(value, name, stream.machine, rank)
        if isinstance(value, (int, np.integer)):
            return int(value)
        raise EPValueError("%s is %r: an address or an array is needed" % (name, value))

    def words(self, n):
        """n int32 words for the kernel, zero."""
        return np.zeros(n, np.int32)

    def start(self, grid, block, stream, values, names):
        """Queue a launch on a stream of a SimMachine."""
        args = tuple(_argument(value, name, stream) for value, name in zip(values, names))
        stream.machine.launch(self, grid, block, args, stream=stream)


def _borrow(array, name, machine, rank):
    """The address of the caller's array, which kernels may touch until the run has ended."""
    address = array.ctypes.data
    if array.nbytes and MEMORY.find(address, array.nbytes) is None:
        machine.borrowed.append(machine.adopt(array, name, rank))
    return address


def _argument(value, name, stream):
    """An argument in the form that the kernel takes."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None) or ["%s[%d]" % (name, i) for i in range(len(value))]
        made = [_argument(v, n, stream) for v, n in zip(value, names)]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if hasattr(value, "host"):
        if value.host is None:
            raise EPValueError("%s is in GPU memory, and the simulator runs: give a NumPy array" % name)
        address = _borrow(value.host, name, stream.machine, stream.rank)
        return SimArray(address, value.shape, value.dtype, name)
    return int(value) if isinstance(value, np.integer) else value


assert set(TYPE_OF.values()) == set(VIEW)
