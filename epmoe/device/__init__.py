"""The intrinsics that kernels are written in, and the machine that runs kernels: a GPU or the simulator.

`SIM` is True if this process uses the simulator. The choice is made once, here. EPMOE_DEVICE=gpu or sim decides. If it
is not set, NUMBA_ENABLE_CUDASIM=1 selects the simulator. Otherwise the GPU is used if numba-cuda can be imported and
there is a CUDA device, and the simulator if not. With EPMOE_DEVICE=gpu and no GPU, kernels can still be compiled to
PTX. The simulator never imports numba.

epmoe.device.intrinsics lists the intrinsics. Decorators: @device_fn for functions, @kernel(max_threads=...) for entry points
with the signature (params: u64 or a tuple of u64, num_tokens: i32, my_rank: i32). ArrayKernel makes a kernel whose
arguments are arrays, tuples and numbers. address_of(array) is the address of its first element. array_at makes an array
from an address inside a kernel. output reads a tuple, or memory. machine(n_ranks, ...) makes the host's side: buffers,
streams, launches.
"""

import os as _os

import numpy as _np

from . import intrinsics as _intrinsics

if not hasattr(_np, "row_stack"):  # NumPy 2.5; numba-cuda 0.30 asks for it, also when the caller imports it
    _np.row_stack = _np.vstack


def _simulate():
    choice = _os.environ.get("EPMOE_DEVICE", "").strip().lower()
    if choice in ("gpu", "sim"):
        return choice == "sim"
    if choice:
        from epmoe_ref.errors import EPValueError

        raise EPValueError("EPMOE_DEVICE=%s must be gpu or sim" % choice)
    if _os.environ.get("NUMBA_ENABLE_CUDASIM", "0").strip() not in ("", "0"):
        return True
    from .gpu_present import gpu_present

    return not gpu_present()


SIM = _simulate()

if SIM:
    from .sim.array_kernel import ArrayKernel, address_of
    from .sim.intrinsics import DTYPES as _DTYPES
    from .sim.intrinsics import INTRINSICS as _INTRINSICS
    from .sim.machine import Kernel as _Kernel
    from .sim.machine import SimMachine, device_fn
    from .sim.user_arrays import array_at, output

    machine = SimMachine
else:
    from .gpu_array_kernel import ArrayKernel
    from .gpu_decorators import device_fn
    from .gpu_kernel import Kernel as _Kernel
    from .gpu_machine import GpuMachine
    from .gpu_ops import DTYPES as _DTYPES
    from .gpu_ops import INTRINSICS as _INTRINSICS
    from .gpu_user_arrays import array_at
    from .ptx_factory import address_of
    from .tuple_or_memory import output

    machine = GpuMachine


def kernel(fn=None, *, max_threads=1024, words=0, shmem=False):
    """Decorator for entry points: fn(params, num_tokens: i32, my_rank: i32), at most max_threads a block.

    words: params is a tuple of this many u64, passed by value. With 0 it is one u64, an address. shmem: it uses
    intrinsics of epmoe.device.shmem.
    """
    if fn is None:
        return lambda f: kernel(f, max_threads=max_threads, words=words, shmem=shmem)
    return _Kernel(fn, max_threads, words, shmem)


globals().update({name: _INTRINSICS[name] for name in _intrinsics.INTRINSICS})
globals().update({name: _DTYPES[name] for name in _intrinsics.DTYPES.split()})

__all__ = [
    "SIM",
    "ArrayKernel",
    "address_of",
    "array_at",
    "machine",
    "output",
    "device_fn",
    "kernel",
    *_intrinsics.INTRINSICS,
    *_intrinsics.DTYPES.split(),
]
