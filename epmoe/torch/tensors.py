"""Passes tensors to kernels, and results to the caller as tensors, without copying memory."""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.nn import Parameter

from epmoe import device
from epmoe.fused_a2a.buffer import Interface
from epmoe.host.arrays import VECTOR_BYTES, DeviceArray, look
from epmoe.host.dlpack import capsule
from epmoe.host.memory_pool import results_of
from epmoe.torch.streams import in_stream_order
from epmoe_ref.errors import EPValueError

CPU = 1, 0  # DLPack's device
# the one in torch.utils.dlpack also handles objects that are not capsules
from_dlpack = torch._C._from_dlpack
# make tensors over a GPU address, twice as fast as DLPack; a CPU-only torch does not have them
_storage = getattr(torch._C, "_construct_storage_from_data_pointer", None)
_tensor = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def readable(what, given):
    """A tensor as kernels read it: detached, C-contiguous, at a multiple of 16 bytes; copied only if it must be.

    given: returned unchanged if it is not a tensor. what: its name.
    """
    if not isinstance(given, Tensor):
        return given
    if not (device.SIM or given.is_cuda):
        raise EPValueError(
            f"{what} is on the CPU, and epmoe runs on the GPU here: move it there with .cuda(), or set "
            "EPMOE_DEVICE=sim for the simulator"
        )
    if given.requires_grad:
        given = given.detach()
    if not given.is_contiguous():
        given = given.contiguous()
    return given.clone() if given.data_ptr() % VECTOR_BYTES else given


def _look(given, names):
    """host.arrays.look() for tensors, which it makes readable()."""
    forms, addresses = [], []
    for one in given:
        if type(one) is not Tensor and type(one) is not Parameter:
            break
        at, ordinal = one.data_ptr(), one.get_device()  # -1 on the CPU
        if at % VECTOR_BYTES or ordinal < 0 or not one.is_contiguous():
            break
        forms.append((one.shape, one.dtype, ordinal))
        addresses.append(at)
    else:
        return tuple(forms), addresses, given
    given = [readable(name, one) for name, one in zip(names, given)]
    if not all(isinstance(one, Tensor) for one in given):
        return look(given, names)
    forms = [(one.shape, one.dtype, one.get_device()) for one in given]
    return tuple(forms), [one.data_ptr() for one in given], given


def tensors(made):
    """Results as tensors over the same memory, which they keep alive; also inside lists and tuples.

    Results that are lent together share one storage, and its end frees the memory. No result is a view, since autograd
    forbids changing a Function's views in place.
    """
    kind = type(made)
    if kind is DeviceArray:
        return _results_of([made._field], made._owner.piece.pool.machine)(made._owner)[0]
    if kind is list or kind is tuple:
        return kind([tensors(one) for one in made])
    if not isinstance(made, np.ndarray):
        return made
    if made.dtype.isbuiltin == 1:  # ml_dtypes have 2
        return from_numpy(made)
    is_fp8 = made.dtype == E4M3
    strides = None if made.flags.c_contiguous or not made.size else made.strides
    form = made.shape, strides, np.uint8 if is_fp8 else made.dtype, CPU
    return (_as_fp8 if is_fp8 else from_dlpack)(capsule(made.ctypes.data, *form, made))


def _results_of(fields, machine):
    """memory_pool.results_of() for a GPU; returns tensors over one storage for each Loan."""
    device, whole = _device(machine.ordinal), []
    for field in fields:
        size = list(field.shape)
        strides = [step // field.dtype.itemsize for step in field.byte_strides]
        dtype, offset = getattr(torch, field.dtype.name), field.offset // field.dtype.itemsize
        form = dict(size=size, stride=strides, dtype=dtype, device=device, storage_offset=offset)
        whole.append(form)
    part = [form | dict(size=[*form["size"]]) for form in whole]  # of the latest n

    def of(loan, n=None):
        storage = _storage(loan.base, device, loan.nbytes)
        # torch keeps this Python object, and so the loan, as long as the storage
        storage.loan = loan
        if n is not None:
            for form in part:
                form["size"][0] = n
        made = []
        for form in whole if n is None else part:
            made.append(_tensor(form, storage))
        return made

    return of


def _device(ordinal):
    return torch.device("cuda", ordinal)


def _as_fp8(of_bytes):
    """An FP8 tensor from a capsule of uint8, since not every torch takes FP8 by DLPack."""
    return from_dlpack(of_bytes).view(torch.float8_e4m3fn).detach()


def _simulated(fields, machine):
    plain = results_of(fields, machine)
    return lambda loan, n=None: tensors(plain(loan, n))


_ways = (look, _simulated) if device.SIM else (_look, _results_of)
TENSORS = Interface(*_ways, from_numpy, in_stream_order)
