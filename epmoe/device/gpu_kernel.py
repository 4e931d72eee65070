"""Kernels on the GPU: compiled by Numba, at the first launch or to PTX without a GPU."""

import contextlib
import types as _types

import numba.cuda.cudadrv.devices as _devices
import numba.cuda.dispatcher as _dispatcher
from numba import cuda

from .fingerprint import fingerprint
from .ptx_factory import i32, types, u64

SM_90 = (9, 0)


@contextlib.contextmanager
def _as_if_on(cc):
    """Let Numba compile for a compute capability without asking a device, and without a context."""
    saved = _dispatcher.get_current_device, _devices.get_context
    device = _types.SimpleNamespace(compute_capability=cc)
    _dispatcher.get_current_device = lambda: device
    _devices.get_context = lambda *_: _types.SimpleNamespace(device=device)
    try:
        yield
    finally:
        _dispatcher.get_current_device, _devices.get_context = saved


def result_type(fn, argument_types, cc):
    """Numba's type of what a device function returns; needs no GPU. Errors: a NumbaError."""
    with _as_if_on(cc):
        return cuda.compile_ptx(fn, argument_types, device=True, cc=cc)[1]


def _current_cc():
    return tuple(cuda.current_context().device.compute_capability)


class Kernel:
    """An entry point of the device: fn(params, num_tokens, my_rank), a Python function. words: see @kernel."""

    def __init__(self, fn, max_threads, words=0):
        self.fn, self.name, self.max_threads, self.n_words = fn, fn.__name__, max_threads, words
        self.signature = (types.UniTuple(u64, words) if words else u64, i32, i32)
        self.__doc__ = fn.__doc__
        self._compiled = None
        self._handles = {}  # compute capability -> CUkernel
        self.loaded = {}  # number of a GPU -> LoadedKernel

    introduce = None  # see load_cubin
    options = {}  # for Numba

    def __repr__(self):
        return "<kernel %s>" % self.name

    def ptx(self, cc=SM_90):
        """The PTX text for a compute capability; needs no GPU."""
        with _as_if_on(cc):
            text, _ = cuda.compile_ptx(
                self.fn, self.signature, cc=cc, launch_bounds=self.max_threads
            )
        return text

    def compile(self, cc=None):
        """The kernel compiled (once) for a compute capability, the current GPU's by default, as Numba has it.

        Not by cuda.jit, which loads it at once, and so needs a GPU, for nothing: handle() loads what the cache keeps.
        """
        if self._compiled is None:
            with _as_if_on(cc or _current_cc()):
                compiled = _dispatcher._Kernel(
                    self.fn, self.signature, launch_bounds=self.max_threads, **self.options
                )
                compiled._codelibrary.get_cubin()
            self._compiled = compiled
        return self._compiled

    def handle(self):
        """The CUkernel, for the current GPU and its like."""
        from .gpu_launch import load_cubin

        cc = _current_cc()
        if cc not in self._handles:
            name, cubin = self.binary()
            self._handles[cc] = load_cubin(cubin, name, self.introduce)
        return self._handles[cc]

    def binary(self, cc=None):
        """(name of the entry point, cubin): out of the disk cache, or compiled and put there.

        cc: compute capability; with it no GPU is needed. Default: the current GPU's.
        """
        from . import kernel_cache

        cc = cc or _current_cc()
        return kernel_cache.find_or_make(self.fingerprint(cc), lambda: self._cubin(cc))

    def fingerprint(self, cc):
        """What the compiled kernel is found by in the cache; None if it depends on things that cannot be compared."""
        return fingerprint(self.fn, self.max_threads, self.n_words, *cc)

    def _cubin(self, cc):
        library = self.compile(cc)._codelibrary
        with _as_if_on(cc):
            return library._entry_name, library.get_cubin().code

    def resources(self):
        """{"registers", "local_bytes", "shared_bytes"} of a thread, a thread and a block, on the current GPU."""
        attributes = self.compile()._codelibrary.get_cufunc().attrs
        return dict(
            registers=attributes.regs, local_bytes=attributes.local, shared_bytes=attributes.shared
        )

    def max_resident_blocks(self, n_threads, shared_bytes=0):
        """How many blocks of n_threads the current GPU holds at once."""
        from .gpu_launch import resident_blocks

        return resident_blocks(self, n_threads, shared_bytes)
