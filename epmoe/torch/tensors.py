"""Tensors to what kernels read, and results to tensors: the same memory both ways."""

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from epmoe import device
from epmoe.host.arrays import DeviceArray, c_strides
from epmoe.host.dlpack import capsule
from epmoe_ref.errors import EPValueError

VECTOR_BYTES = 16  # kernels read rows as vectors of so many bytes
_CPU = (1, 0)  # DLPack's device


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
    tensor = given.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor


def tensors(made):
    """Results as tensors over the same memory, which they keep alive; also inside lists and tuples."""
    if isinstance(made, (list, tuple)):
        return type(made)(tensors(one) for one in made)
    if not isinstance(made, (DeviceArray, np.ndarray)):
        return made
    # By DLPack and not by .view(dtype): a view made inside a Function could not be changed in place afterwards.
    if made.dtype.name == "float8_e4m3fn":  # not every torch takes it by DLPack
        return _tensor(made, np.dtype(np.uint8)).view(torch.float8_e4m3fn)
    return _tensor(made, made.dtype)


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
