"""Compiles NVSHMEM's device functions once on each host, not with every kernel that calls them.

nvshmem4py passes them to Numba as C++ that includes all of NVSHMEM's headers. Compiling this takes longer than the rest
of a kernel, and gives the same result each time. The disk cache keeps its link-time code, with the C++ text as the key.
"""

import contextlib
import hashlib
import warnings

from cuda.core import ObjectCode
from numba.cuda.cudadrv import nvrtc

from . import kernel_cache
from .fingerprint import versions

_code = {}  # key -> link-time code


@contextlib.contextmanager
def compiled_once():
    """Context for linking kernels. C++ that this or another process has compiled before is not compiled again."""
    saved = nvrtc.compile

    def compile(source, name, cc, ltoir=False, **options):
        if not ltoir:
            return saved(source, name, cc, **options)
        key = hashlib.sha256(repr((versions(), source, cc, sorted(options.items()))).encode()).hexdigest()
        if key not in _code:
            _code[key] = kernel_cache.find_or_make(
                key, lambda: (name, bytes(saved(source, name, cc, ltoir=True, **options)[0].code))
            )[1]
        return ObjectCode.from_ltoir(_code[key], name=name), []

    nvrtc.compile = compile
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "NVRTC log messages")  # about NVSHMEM's own headers
            yield
    finally:
        nvrtc.compile = saved
