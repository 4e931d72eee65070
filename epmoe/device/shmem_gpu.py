"""The SHMEM intrinsics on a GPU: NVSHMEM's device functions, through the Numba bindings of nvshmem4py.

Kernels that use them are compiled with link-time optimisation against NVSHMEM's device code (nvshmem_code.py).
"""

from numba import cuda

from epmoe.provenance import install
from epmoe_ref.errors import UnavailableError

from .ptx_factory import typed_intrinsic, types, u64

REMEDY = "%s; `epmoe doctor` says what is missing" % install("shmem")

try:
    from nvshmem.bindings.device.numba import fence, quiet, signal_op, uint8_put_nbi_warp
    from nvshmem.core import SignalOp
except Exception as error:  # ImportError, or RuntimeError if headers are missing
    raise UnavailableError(
        "NVSHMEM's bindings cannot be used (%s: %s): %s" % (type(error).__name__, error, REMEDY)
    ) from error

SET = int(SignalOp.SIGNAL_SET)


def _pointer(name, target):
    """An intrinsic that turns a u64 address into a pointer."""

    def codegen(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return typed_intrinsic(name, lambda address: types.CPointer(target)(u64), codegen, 1)


bytes_at = _pointer("bytes_at", types.uint8)
word_at = _pointer("word_at", types.uint64)


@cuda.jit(device=True, forceinline=True)
def shmem_put_nbi_warp(dst, src, nbytes, pe):
    """A warp starts copying nbytes from src, in symmetric memory, to dst at rank pe."""
    uint8_put_nbi_warp(bytes_at(dst), bytes_at(src), types.uint64(nbytes), types.int32(pe))


@cuda.jit(device=True, forceinline=True)
def shmem_signal_set(word, value, pe):
    """Write the uint64 `value` to `word` at rank pe."""
    signal_op(word_at(word), types.uint64(value), types.int32(SET), types.int32(pe))


@cuda.jit(device=True, forceinline=True)
def shmem_fence():
    """Order this thread's earlier puts to each rank before its later ones."""
    fence()


@cuda.jit(device=True, forceinline=True)
def shmem_quiet():
    """Return when this thread's puts have arrived."""
    quiet()
