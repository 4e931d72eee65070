"""Kernels that take arrays as arguments, on a GPU. There is one Kernel for each set of argument types."""

import math
from array import array
from functools import cache, partial

import numpy as np
from numba import cuda

from epmoe_ref.errors import EPValueError

from .cuda_stream import handle_of
from .gpu_kernel import Kernel
from .gpu_machine import GpuMachine, Stream
from .ptx_factory import types

ELEMENTS = {
    np.dtype(n): getattr(types, n) for n in ("uint8", "uint16", "int32", "uint32", "uint64", "float32", "float16")
}


def _element(dtype):
    """Numba's type for a dtype: bf16 is uint16, 8-bit floats are uint8."""
    dtype = np.dtype(dtype)
    if dtype not in ELEMENTS and dtype.kind in "Vfu" and dtype.itemsize <= 2:
        dtype = np.dtype("uint%d" % (8 * dtype.itemsize))
    if dtype not in ELEMENTS:
        raise EPValueError(f"kernels take no arrays of {dtype}: convert it")
    return ELEMENTS[dtype]


def type_of(value):
    """The Numba type of an argument: an Array, a tuple, or a NumPy number."""
    if isinstance(value, tuple):
        return types.BaseTuple.from_types([type_of(v) for v in value], type(value))
    if isinstance(value, np.generic):
        return ELEMENTS[value.dtype]
    return types.Array(_element(value.dtype), len(value.shape), "C")


def _words(value):
    """An argument as the driver takes it: an array("Q"), a word for each number. An array becomes Numba's record."""
    words = array("Q")
    if isinstance(value, tuple):
        for v in value:
            words += _words(v)
    elif isinstance(value, np.generic):
        words.frombytes(value.tobytes().ljust(8, b"\0"))
    elif value.host is not None:
        raise EPValueError(f"an array of shape {value.shape} is in host memory: cuda.to_device(array)")
    else:
        itemsize, shape = value.dtype.itemsize, value.shape
        strides = [itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        owner, parent = 0, 0
        words.extend((owner, parent, math.prod(shape), itemsize, value.address, *shape, *strides))
    return words


class ArrayKernel:
    """A kernel whose arguments are arrays, tuples and numbers. fn: the plain function; max_threads: of a block.

    shmem: it uses epmoe.device.shmem and is linked with NVSHMEM's code. NVSHMEM must be initialised before a launch. An
    array is a record with host, address, shape, dtype (epmoe.host.arrays.Array).
    """

    def __init__(self, fn, max_threads, shmem=False):
        self.max_threads = max_threads
        self._kernel_for = cache(partial(Kernel, fn, max_threads, 0, shmem))

    def of(self, values):
        """The Kernel for arguments of these types."""
        return self._kernel_for(tuple(map(type_of, values)))

    def stream_of(self, stream, n_ranks=1, rank=0):
        """A stream of epmoe as it is; any other that handle_of() takes as one of epmoe's."""
        if hasattr(stream, "machine"):
            return stream
        made = Stream(_machine(cuda.current_context().device.id), rank, handle_of(stream))
        made.given = stream  # stays alive
        return made

    def address(self, value, name, stream, rank):
        """The address of a pointer argument: a number, an array, or an object with `address` or `ptr`."""
        for attribute in ("address", "ptr"):
            value = getattr(value, attribute, value)
        if hasattr(value, "__cuda_array_interface__"):
            value = value.__cuda_array_interface__["data"][0]
        if isinstance(value, (int, np.integer)):
            return np.uint64(value)
        raise EPValueError(f"{name} is {value!r}: an address in GPU memory, or an array there, is needed")

    def words(self, n):
        """n int32 words for the kernel, zero; np.asarray() copies them to the host."""
        return cuda.to_device(np.zeros(n, np.int32))

    def start(self, grid, block, stream, values, names):
        """Launch the kernel; inside the machine's hold(), when hold() ends."""
        stream.machine.prepared(self.of(values), grid, block, _words(tuple(values)), stream=stream).start()


@cache
def _machine(current):
    """The machine for streams that no machine made. current: number of the current GPU, which it is for."""
    return GpuMachine()
