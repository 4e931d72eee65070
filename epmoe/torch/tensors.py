"""Tensors to what kernels read, and results to tensors: the same memory both ways."""

import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from epmoe import device
from epmoe.host.arrays import DeviceArray, c_strides
from epmoe.host.dlpack import capsule
from epmoe.host.lending import Loan
from epmoe_ref.errors import EPValueError

VECTOR_BYTES = 16  # kernels read rows as vectors of so many bytes
_CPU, _CUDA = (1, 0), 2  # DLPack's devices
UINT8 = np.dtype(np.uint8)
_DTYPES = {
    np.dtype(getattr(ml_dtypes, name, None) or name): getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float16", "float32", "int32", "int64", "uint8")
}


def readable(what, given):
    """A tensor as kernels read it: detached, C-contiguous, at a multiple of 16 bytes; a copy only where it is not so.

    given: a tensor, or lists of them; None stays None.
    """
    if isinstance(given, (list, tuple)):
        return [readable(what, one) for one in given]
    if not isinstance(given, torch.Tensor):
        return given
    if not device.SIM and not given.is_cuda:
        raise EPValueError(
            f"{what} is on the CPU, and epmoe runs on the GPU here: {what}.cuda(), or EPMOE_DEVICE=sim "
            "for the simulator"
        )
    tensor = given.detach() if given.requires_grad else given
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor


def tensors(made):
    """Results as tensors over the same memory, which they keep alive; also inside lists and tuples."""
    return _tensors(made, {})


def _tensors(made, storages):
    """storages: of what was lent together, by the Loan's id: results of one Loan have one in common."""
    kind = type(made)
    if kind is DeviceArray and type(made._owner) is Loan and made.dtype in _DTYPES:
        return _in_storage(made, storages)
    if kind is list or kind is tuple:
        return kind([_tensors(one, storages) for one in made])
    if kind is not DeviceArray and not isinstance(made, np.ndarray):
        return made
    # By DLPack and not by .view(dtype): a view made inside a Function could not be changed in place afterwards.
    if made.dtype.name == "float8_e4m3fn":  # not every torch takes it by DLPack
        return _tensor(made, np.dtype(np.uint8)).view(torch.float8_e4m3fn)
    return _tensor(made, made.dtype)


def _in_storage(array, storages):
    """A tensor of its own, no view, in the storage of what was lent together."""
    loan, dtype = array._owner, _DTYPES[array.dtype]
    storage = storages.get(id(loan))
    if storage is None:
        of_loan = capsule(loan.base, (loan.nbytes,), (1,), UINT8, (_CUDA, array.ordinal), loan)
        storage = storages[id(loan)] = from_dlpack(of_loan).untyped_storage()
    itemsize = array.dtype.itemsize
    strides = array.strides
    if strides is not None:
        strides = tuple([s // itemsize for s in strides])
    else:
        strides = c_strides(array.shape, 1)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, (array.address - loan.base) // itemsize, array.shape, strides)


def _tensor(array, dtype):
    if isinstance(array, DeviceArray):
        address, place, strides = array.address, array.__dlpack_device__(), array.strides
    else:
        address, place, strides = array.ctypes.data, _CPU, array.strides
    if strides is None or 0 in array.shape:
        strides = c_strides(array.shape, 1)
    else:
        strides = tuple(s // array.dtype.itemsize for s in strides)
    return from_dlpack(capsule(address, array.shape, strides, dtype, place, array))
