"""A DLPack capsule around an address: how torch, CuPy and JAX take a DeviceArray without a copy."""

import atexit
import ctypes

import numpy as np
from epmoe_ref.errors import EPValueError

_KINDS = {"i": 0, "u": 1, "f": 2}
_NAMED = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e8m0fnu": 14}  # DLDataTypeCode of the DLPack headers


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _DataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# What a consumer still looks at: address of the managed tensor -> (managed tensor, shape, strides, owner)
_alive = {}


@_Deleter
def _delete(managed):
    _alive.pop(ctypes.addressof(managed.contents), None)


@_CapsuleDestructor
def _destroy(capsule_pointer):
    # A consumer renames the capsule and calls the deleter itself; one that nobody consumed is ours to delete.
    if _is_valid(capsule_pointer, b"dltensor"):
        _alive.pop(_get_pointer(capsule_pointer, b"dltensor"), None)


_never_free = ctypes.pythonapi.Py_IncRef
_never_free.restype, _never_free.argtypes = None, [ctypes.py_object]


@atexit.register
def _leave():
    """Who still holds memory at the interpreter's end lets go of it later, when nothing of ours can run any more."""
    for held in _alive.values():
        held[0].deleter = _Deleter()    # none: the consumer calls nothing
        _never_free(held)


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]


def capsule(address, shape, strides, dtype, device, owner):
    """PyCapsule "dltensor" over memory at address; strides in elements; owner lives until the consumer lets go."""
    dtype = np.dtype(dtype)
    code = _NAMED.get(dtype.name, _KINDS.get(dtype.kind))
    if code is None:
        raise EPValueError(f"DLPack has no code for {dtype}; use .numpy() or __cuda_array_interface__")
    n = len(shape)
    c_shape, c_strides = (ctypes.c_int64 * n)(*shape), (ctypes.c_int64 * n)(*strides)
    managed = _ManagedTensor()
    managed.tensor = _Tensor(address, _Device(*device), n, _DataType(code, dtype.itemsize * 8, 1),
                             ctypes.cast(c_shape, ctypes.POINTER(ctypes.c_int64)),
                             ctypes.cast(c_strides, ctypes.POINTER(ctypes.c_int64)), 0)
    managed.deleter = _delete
    key = ctypes.addressof(managed)
    _alive[key] = (managed, c_shape, c_strides, owner)
    return _new(key, b"dltensor", ctypes.cast(_destroy, ctypes.c_void_p))
