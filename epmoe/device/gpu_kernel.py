"""Kernels on the GPU. Numba compiles them at the first launch, or to PTX without a GPU."""

import contextlib
import types as _types
from functools import cached_property

import numba.cuda.cudadrv.devices as _devices
import numba.cuda.dispatcher as _dispatcher
from cuda.pathfinder import DynamicLibNotFoundError
from numba import cuda

from epmoe.provenance import install
from epmoe_ref.errors import UnavailableError

from . import kernel_cache
from .fingerprint import fingerprint
from .garbage import without_collecting
from .nvshmem_code import compiled_once
from .ptx_factory import i32, types, u64

SM_90 = (9, 0)


@contextlib.contextmanager
def as_if_on(cc):
    """Let Numba compile for a compute capability without asking a device, and without a context."""
    saved = _dispatcher.get_current_device, _devices.get_context
    device = _types.SimpleNamespace(compute_capability=cc)
    _dispatcher.get_current_device = lambda: device
    _devices.get_context = lambda *_: _types.SimpleNamespace(device=device)
    try:
        yield
    except DynamicLibNotFoundError as error:
        raise UnavailableError(
            "no kernel can be compiled: NVVM, NVRTC or nvJitLink is missing (`epmoe doctor` says which): "
            + install("gpu")
        ) from error
    finally:
        _dispatcher.get_current_device, _devices.get_context = saved


def result_type(fn, argument_types, cc):
    """Numba's type for the return value of a device function. Needs no GPU. Errors: a NumbaError."""
    with as_if_on(cc):
        return cuda.compile_ptx(fn, argument_types, device=True, cc=cc)[1]


class Kernel:
    """An entry point of the device, made by @kernel. signature: types of other arguments than those that it names."""

    def __init__(self, fn, max_threads, n_words=0, shmem=False, signature=None):
        self.fn, self.name, self.max_threads, self.n_words = fn, fn.__name__, max_threads, n_words
        self.signature = signature or (types.UniTuple(u64, n_words) if n_words else u64, i32, i32)
        self.shmem, self.__doc__ = shmem, fn.__doc__
        self.loaded = {}  # number of a GPU -> LoadedKernel

    def __repr__(self):
        return "<kernel %s>" % self.name

    def ptx(self, cc=SM_90):
        """The PTX for a compute capability. Needs no GPU."""
        with as_if_on(cc):
            return self._code.get_asm_str(cc)

    def cubin(self, cc):
        """(name of the entry point, machine code), compiled for a compute capability. Needs no GPU."""
        with as_if_on(cc), compiled_once() if self.shmem else contextlib.nullcontext():
            return self._code._entry_name, bytes(self._code.get_cubin().code)

    @cached_property
    @without_collecting()  # Numba makes a million objects for a kernel
    def _code(self):
        """Numba's code of the kernel, made once, for all compute capabilities. Ask for it inside as_if_on().

        It does not use cuda.jit, which would load the code at once. The code to load comes from the disk cache.
        """
        # NVSHMEM's code is linked as link-time code: without lto it would be compiled as one more program
        how = dict(launch_bounds=self.max_threads, lto=self.shmem)
        return _dispatcher._Kernel(self.fn, self.signature, **how)._codelibrary

    def binary(self, cc):
        """The same as cubin(), from the disk cache, or compiled and stored there."""
        return kernel_cache.find_or_make(self.fingerprint(cc), lambda: self.cubin(cc))

    def fingerprint(self, cc):
        """The cache key of the compiled kernel; None if it depends on objects that cannot be compared."""
        return fingerprint(self.fn, self.max_threads, repr(self.signature), *cc)
