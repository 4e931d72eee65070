"""Tensors to what kernels read, and results to tensors: the same memory both ways."""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.nn import Parameter

from epmoe import device
from epmoe.fused_a2a.arguments import PLAIN, Interface
from epmoe.host.arrays import VECTOR_BYTES, DeviceArray, peek
from epmoe.host.dlpack import capsule, form_of
from epmoe_ref.errors import EPValueError

CPU = 1, 0  # DLPack's device
# torch.utils.dlpack's looks at objects that are no capsules too
from_dlpack = torch._C._from_dlpack
# over an address of a GPU, in half of the time that DLPack takes; a torch for CPUs alone does not have them
_storage = getattr(torch._C, "_construct_storage_from_data_pointer", None)
_tensor = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def readable(what, given):
    """A tensor as kernels read it: detached, C-contiguous, at a multiple of 16 bytes; a copy only where it is not so.

    given: a tensor, or lists of them; None stays None. what: its name; None: a tensor on the CPU is not refused.
    """
    if not isinstance(given, Tensor):
        if isinstance(given, (list, tuple)):
            return [readable(what, one) for one in given]
        return given
    if not (device.SIM or given.is_cuda):
        if what is None:
            return given
        raise EPValueError(
            f"{what} is on the CPU, and epmoe runs on the GPU here: move it there with .cuda(), or set "
            "EPMOE_DEVICE=sim for the simulator"
        )
    if given.requires_grad:
        given = given.detach()
    if not given.is_contiguous():
        given = given.contiguous()
    return given.clone() if given.data_ptr() % VECTOR_BYTES else given


def _seen(given, what):
    """(form, address, tensor), as host.arrays.peek, of a tensor as kernels read it: see readable()."""
    at, ordinal = given.data_ptr(), given.get_device()
    if ordinal < 0 or at % VECTOR_BYTES or not given.is_contiguous():
        return peek(readable(what, given), what)
    return (given.shape, given.dtype, ordinal), at, given


def _seen_otherwise(given, what):
    return (_seen if isinstance(given, Tensor) else peek)(given, what)


def tensors(made):
    """Results as tensors over the same memory, which they keep alive; also inside lists and tuples.

    Each has a storage of its own, and lent memory comes back when the last storage over it has ended. None is a view,
    which could not be changed in place behind a Function.
    """
    kind = type(made)
    if kind is DeviceArray:
        return _lent(made._owner, [made._field])[0]
    if kind is list or kind is tuple:
        return kind([tensors(one) for one in made])
    if not isinstance(made, np.ndarray):
        return made
    if made.dtype.isbuiltin == 1:  # ml_dtypes have 2
        return from_numpy(made)
    is_fp8 = made.dtype == E4M3
    strides = None if made.flags.c_contiguous or not made.size else made.strides
    form = form_of(made.shape, strides, np.uint8 if is_fp8 else made.dtype, CPU)
    return (_as_fp8 if is_fp8 else from_dlpack)(capsule(made.ctypes.data, form, made))


def _lent(loan, fields):
    """What lies in lent memory of a GPU, as tensors."""
    made, base, here = [], loan.base, loan.lender.machine.ordinal
    for field in fields:
        ordinal, device, nbytes, form = field.of_torch
        if ordinal != here:
            field.of_torch = ordinal, device, nbytes, form = _like(field, here)
        storage = _storage(base + field.offset, device, nbytes)
        # torch keeps a storage's object, with all that it refers to, as long as the storage
        storage.loan = loan
        made.append(_tensor(form, storage))
    return made


def _like(field, ordinal):
    """(number of a GPU, device, bytes of the storage, form) of tensors like a Field there."""
    dtype = getattr(torch, field.dtype.name)
    strides = tuple(step // field.dtype.itemsize for step in field.byte_strides)
    device = torch.device("cuda", ordinal)
    form = dict(size=field.shape, stride=strides, dtype=dtype, device=device, storage_offset=0)
    return ordinal, device, field.span, form


def _as_fp8(of_bytes):
    """Of a capsule of uint8: not every torch takes FP8 by DLPack."""
    return from_dlpack(of_bytes).view(torch.float8_e4m3fn).detach()


def _simulated(loan, fields):
    return tensors(PLAIN.results(loan, fields))


TENSORS = Interface(
    {Tensor: _seen, Parameter: _seen},
    _seen_otherwise,
    _simulated if device.SIM else _lent,
    from_numpy,
)
