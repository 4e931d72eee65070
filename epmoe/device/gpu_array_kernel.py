"""Kernels that take arrays as arguments, on a GPU: compiled and launched through the public numba.cuda.jit.

What Numba compiled is kept in the disk cache, as machine code, and given back to its dispatcher at the next start.
"""

import types as _types
import warnings
from typing import NamedTuple

import numpy as np
from cuda.core import ObjectCode
from numba import cuda
from numba.cuda import dispatcher as _dispatcher
from numba.cuda.codegen import CUDACodeLibrary

from epmoe.capability import OLDEST
from epmoe_ref.errors import EPValueError

from . import kernel_cache
from .fingerprint import fingerprint
from .gpu_kernel import _as_if_on, _current_cc
from .ptx_factory import types

ELEMENTS = {
    np.dtype(n): getattr(types, n)
    for n in ("uint8", "uint16", "int32", "uint32", "uint64", "float32", "float16")
}
NUMBERS = {np.int32: types.int32, np.uint64: types.uint64, np.float32: types.float32}


def _element(dtype):
    """The dtype as kernels see it: bf16 is uint16, 8-bit floats are uint8."""
    dtype = np.dtype(dtype)
    if dtype in ELEMENTS:
        return dtype
    if dtype.kind not in "Vfu" or dtype.itemsize > 2:
        raise EPValueError("kernels take no arrays of %s: convert it" % dtype)
    return np.dtype("uint%d" % (8 * dtype.itemsize))


def type_of(value):
    """The Numba type of an argument: an Array, a tuple, or a NumPy number."""
    if isinstance(value, tuple):
        made = [type_of(v) for v in value]
        alike = len(set(made)) == 1
        if hasattr(value, "_fields"):
            return (
                types.NamedUniTuple(made[0], len(made), type(value))
                if alike
                else types.NamedTuple(made, type(value))
            )
        return types.UniTuple(made[0], len(made)) if alike else types.Tuple(made)
    if hasattr(value, "shape") and hasattr(value, "address"):
        return types.Array(ELEMENTS[_element(value.dtype)], len(value.shape), "C")
    return NUMBERS[type(value)]


class Compiled(NamedTuple):
    """An ArrayKernel for arguments of these types, as those who compile beforehand know kernels."""

    kernel: object
    given: tuple

    @property
    def name(self):
        """Of the kernel's function."""
        return self.kernel.name

    def fingerprint(self, cc):
        """What the machine code is found by in the disk cache; None if it depends on things that cannot be compared."""
        return fingerprint(self.kernel.fn, self.kernel.max_threads, repr(self.given), *cc)

    def binary(self, cc):
        """(name of the entry point, cubin): out of the disk cache, or compiled and put there; needs no GPU."""
        return kernel_cache.find_or_make(
            self.fingerprint(cc), lambda: self.kernel.made(self.given, cc)
        )


class ArrayKernel:
    """A kernel whose arguments are arrays, tuples and numbers. fn: the plain function; max_threads: of a block.

    shmem: it uses epmoe.device.shmem, and is linked with NVSHMEM's code, which must be initialised before a launch.
    An array is a record with address, shape, dtype, owner (epmoe.host.arrays.Array).
    """

    def __init__(self, fn, max_threads, shmem=False):
        self.fn, self.name, self.max_threads, self.shmem = fn, fn.__name__, max_threads, shmem
        self.options = dict(launch_bounds=max_threads, **(dict(lto=True) if shmem else {}))
        self.numba = cuda.jit(fn, **self.options)
        self._libraries = {}  # argument types -> code, where there is no GPU

    # ------------------------------------------------------------------ without a GPU
    def ptx(self, values, cc):
        """The PTX text for a compute capability and arguments of these types."""
        with _as_if_on(cc):
            return self._library(values).get_asm_str(cc)

    def cubin(self, values, cc):
        """The machine code for a compute capability."""
        with _as_if_on(cc):
            return bytes(self._library(values).get_cubin(cc).code)

    def entry(self, values):
        """The entry point's name in PTX and cubin."""
        with _as_if_on(OLDEST):
            return self._library(values)._entry_name

    def made(self, given, cc):
        """(name of the entry point, cubin) for arguments of these types."""
        with _as_if_on(cc):
            library = self._library_for(given)
            return library._entry_name, bytes(library.get_cubin(cc).code)

    def _library(self, values):
        return self._library_for(tuple(map(type_of, values)))

    def _library_for(self, given):
        """Numba's code for arguments of these types, of which it makes PTX and cubins for any device."""
        if given not in self._libraries:
            with _as_if_on(OLDEST):
                self._libraries[given] = _dispatcher._Kernel(
                    self.fn, given, **self.options
                )._codelibrary
        return self._libraries[given]

    # ------------------------------------------------------------------ on one
    def compiled(self, values):
        """Numba's kernel for arguments of these types, loaded."""
        given = tuple(map(type_of, values))
        if self.shmem:  # Numba introduces what it has linked to NVSHMEM when it loads it
            self.numba.compile(given)
        elif given not in self.numba.overloads:
            cc = _current_cc()
            found = kernel_cache.find_or_make(
                Compiled(self, given).fingerprint(cc), lambda: self._by_numba(given, cc)
            )
            if given not in self.numba.overloads:
                self.numba.add_overload(_kernel_of(given, cc, *found), given)
        made = self.numba.overloads[given]
        made._codelibrary.get_cufunc()  # loading waits for kernels that run, which may wait for this one
        return made

    def _by_numba(self, given, cc):
        library = self.numba.compile(given)._codelibrary
        return library._entry_name, bytes(library.get_cubin(cc).code)

    def resident_blocks(self, values, threads, n_sms=None):
        """How many blocks of `threads` threads the GPU, or n_sms of its multiprocessors, hold at once."""
        device = cuda.current_context().device
        return (
            self.compiled(values).max_cooperative_grid_blocks(threads)
            // device.MULTIPROCESSOR_COUNT
            * (n_sms or device.MULTIPROCESSOR_COUNT)
        )

    def place(self, stream, rank):
        """Where a launch on this stream runs: what gives addresses of arrays."""
        return Place()

    def words(self, n):
        """n int32 words of the kernel's own, zero."""
        return cuda.to_device(np.zeros(n, np.int32))

    def read(self, words):
        """The values of such words."""
        return words.copy_to_host()

    def wait(self, stream):
        """Returns when what was launched on the stream has ended."""
        cuda.synchronize() if stream is None else _numba_stream(stream).synchronize()

    def start(self, grid, block, stream, values, names):
        """Launch; inside machine.hold() of the stream's machine, at its end. A dry machine remembers the kernel."""
        machine = getattr(stream, "machine", None)
        if hasattr(machine, "kernels"):
            machine.kernels[Compiled(self, tuple(map(type_of, values)))] = None
            return
        resident = self.resident_blocks(values, block)
        if not 1 <= block <= self.max_threads or block % 32:
            raise EPValueError(
                "block=%d threads: %s takes a multiple of 32 up to %d"
                % (block, self.name, self.max_threads)
            )
        if not 1 <= grid <= resident:
            raise EPValueError(
                "grid=%d blocks of %d threads of %s: 1 to %d can be resident at once, and blocks wait "
                "for each other" % (grid, block, self.name, resident)
            )
        args = [_argument(value) for value in values]
        with warnings.catch_warnings():  # a grid that leaves room for other ranks is no mistake
            warnings.filterwarnings("ignore", "Grid size")
            configured = self.numba[grid, block, _numba_stream(stream)]
        if machine is not None and machine.held:
            machine.queue(lambda: configured(*args))
        else:
            configured(*args)


def _kernel_of(given, cc, entry, cubin):
    """Numba's kernel made of machine code, as its own cache makes one."""
    library = CUDACodeLibrary(None, entry, entry_name=entry)
    with _as_if_on(cc):
        library._cubin_cache[library._ensure_cc(None)] = ObjectCode.from_cubin(
            cubin
        )  # where its loading looks
    library._finalized = True
    return _dispatcher._Kernel._rebuild(
        cooperative=False,
        name=entry,
        signature=types.none(*given),
        codelibrary=library,
        debug=False,
        lineinfo=False,
        call_helper=None,
        extensions=[],
    )


class Place:
    """Arrays of the caller, by address."""

    def address(self, value, name):
        """The address of a pointer argument: a number, an array, or what has one as `address`, `buffer` or `ptr`."""
        for attribute in ("address", "ptr"):
            value = getattr(value, attribute, value)
        if hasattr(value, "__cuda_array_interface__"):
            value = value.__cuda_array_interface__["data"][0]
        if isinstance(value, (int, np.integer)):
            return np.uint64(value)
        raise EPValueError(
            "%s is %r: an address in GPU memory, or an array there, is needed" % (name, value)
        )


def _argument(value):
    """An argument as Numba's launch takes it."""
    if isinstance(value, tuple):
        made = [_argument(v) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if hasattr(value, "shape") and hasattr(value, "address"):
        if getattr(value, "host", None) is not None:
            raise EPValueError(
                "an array of shape %s is in host memory: cuda.to_device(array)" % (value.shape,)
            )
        interface = dict(
            shape=value.shape,
            typestr=_element(value.dtype).str,
            data=(value.address, False),
            version=3,
            strides=None,
        )
        return cuda.as_cuda_array(
            _types.SimpleNamespace(__cuda_array_interface__=interface, owner=value), sync=False
        )
    return value


def _numba_stream(stream):
    """A Numba stream for ours, for Numba's own, for a handle, or for None (the default stream)."""
    if stream is None:
        return cuda.default_stream()
    handle = getattr(stream, "handle", stream)
    return stream if hasattr(stream, "async_done") else cuda.external_stream(int(handle))


def own_stream(n_ranks, rank):
    """No stream is needed: Numba has a default one."""
    return None
