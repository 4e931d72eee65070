"""A DLPack capsule around an address: how torch, CuPy and JAX take a DeviceArray without a copy.

NumPy makes it, for an array over that address, and the words that name device and type are changed. A consumer lets go
of memory from C: in any thread, while an exception is on its way, after the interpreter's end. NumPy's deleter is
written for that; one in Python would crash.
"""

import ctypes
from functools import cache

import numpy as np

from epmoe_ref.errors import EPValueError

_KINDS = {"i": 0, "u": 1, "f": 2}
_NAMED = {
    "bfloat16": 4,
    "float8_e4m3fn": 10,
    "float8_e8m0fnu": 14,
}  # DLDataTypeCode of the DLPack headers
_OF_SIZE = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    """The first fields of a DLTensor, with which the capsule's structure begins."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Memory:
    """What NumPy takes for memory of this process, and does not touch; it keeps the owner alive."""

    __slots__ = ("__array_interface__", "owner")


@cache
def _named(dtype):
    """(DLPack's code of it, what NumPy may call it, bytes)."""
    code = _NAMED.get(dtype.name, _KINDS.get(dtype.kind))
    if code is None:
        raise EPValueError(
            f"DLPack has no code for {dtype}; use .numpy() or __cuda_array_interface__"
        )
    return code, _OF_SIZE[dtype.itemsize], dtype.itemsize


def capsule(address, shape, strides, dtype, device, owner):
    """PyCapsule "dltensor" over memory at address; strides in elements; owner lives until the consumer lets go."""
    code, typestr, nbytes = _named(np.dtype(dtype))
    memory = _Memory()
    memory.owner = owner
    memory.__array_interface__ = {
        "version": 3,
        "data": (address, False),
        "shape": tuple(shape),
        "typestr": typestr,
        "strides": tuple([s * nbytes for s in strides]),
    }
    made = np.asarray(memory).__dlpack__()
    tensor = _Tensor.from_address(_get_pointer(made, b"dltensor"))
    tensor.device.device_type, tensor.device.device_id = device
    tensor.code = code
    return made
