"""NumPy arrays and DLPack capsules for an address; with a capsule torch, CuPy and JAX take a DeviceArray without a copy.

NumPy makes the capsule for an array over that address; then its device and type are overwritten. A consumer frees the
memory from C, in any thread, during an exception, or after the interpreter has ended. NumPy's deleter allows that; one
written in Python would crash.
"""

import ctypes
import struct
import sys
from functools import cache

import numpy as np

from epmoe_ref.errors import EPValueError

# DLDataTypeCode of the DLPack headers, by NumPy's kind or name
_CODES = {"i": 0, "u": 1, "f": 2, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e8m0fnu": 14}
_HEADER_AT, _HEADER_BYTES = 8, 13  # of a DLTensor: device type, device id, dimensions, type code
_MEMORY = memoryview((ctypes.c_uint8 * sys.maxsize).from_address(0)).cast("B")  # by address

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Memory(ctypes.c_uint8 * (sys.maxsize // 2)):
    """Looks to NumPy like memory of this process from an address on; NumPy does not touch it. Keeps the owner alive."""

    __slots__ = ("owner",)


@cache
def _named(dtype):
    """(DLPack's type code, an unsigned NumPy dtype of the same size)."""
    code = _CODES.get(dtype.name, _CODES.get(dtype.kind))
    if code is None:
        raise EPValueError(f"DLPack has no code for {dtype}; use .numpy() or __cuda_array_interface__")
    return code, np.dtype(f"u{dtype.itemsize}")


def numpy_at(address, shape, dtype, strides=None, owner=None):
    """A NumPy array over memory at address, host or GPU; keeps owner alive. strides: in bytes, None for C order."""
    memory = Memory.from_address(address)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory, 0, strides)


def capsule(address, shape, strides, dtype, device, owner):
    """PyCapsule "dltensor" for memory at address; keeps owner alive until the consumer frees it.

    strides: in bytes, None for C order.
    """
    code, plain = _named(np.dtype(dtype))
    made = numpy_at(address, shape, plain, strides, owner).__dlpack__()
    at = _get_pointer(made, b"dltensor") + _HEADER_AT
    header = struct.pack("=iiiB", *device, len(shape), code)
    _MEMORY[at : at + _HEADER_BYTES] = header
    return made
