"""One view of arrays from NumPy, torch, CuPy, DLPack or the CUDA array interface, and DeviceArray for results."""

from functools import lru_cache
from math import prod

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from epmoe.host.dlpack import capsule
from epmoe_ref.errors import EPValueError

VECTOR_BYTES = 16  # kernels read rows in vectors of this many bytes
MOST_CUT = 1024  # first entries of Fields that are remembered
_DTYPES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
_TORCH_DTYPES = {f"torch.{t}": np.dtype(t) for t in _DTYPES}
_TORCH_DTYPES |= {f"torch.{t.__name__}": np.dtype(t) for t in (bfloat16, float8_e4m3fn)}


class Array:
    """One array of the caller: its place, shape and type. `host` is the NumPy array, or None for device memory.

    `strides` are in bytes, None if the array is C-contiguous. `owner` keeps the memory alive. `form`: everything except
    the values that decides whether the array is accepted.
    """

    __slots__ = ("host", "address", "shape", "dtype", "device", "strides", "owner", "form")

    def __init__(self, host, address, shape, dtype, device, strides, owner):
        self.host, self.address, self.shape, self.dtype = host, address, shape, dtype
        self.device, self.strides, self.owner = device, strides, owner
        misaligned = None if host is not None else address % VECTOR_BYTES
        self.form = shape, dtype, device, strides, misaligned


class Field:
    """One array in lent memory: shape, dtype, offset from its base [bytes], strides [bytes] or None for C order."""

    __slots__ = ("shape", "dtype", "offset", "strides", "nbytes", "form")

    def __init__(self, shape, dtype, offset, strides=None):
        self.shape, self.dtype = tuple([int(n) for n in shape]), np.dtype(dtype)
        self.offset, self.strides = offset, strides
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self.form = self.shape, self.dtype, strides

    @property
    def byte_strides(self):
        """Strides in bytes, never None."""
        return self.strides or c_strides(self.shape, self.dtype.itemsize)

    @property
    def span(self):
        """Bytes from the beginning of the first element to the end of the last one; 0 without elements."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.byte_strides)
        return sum((n - 1) * step for n, step in steps) + self.dtype.itemsize

    @lru_cache(MOST_CUT)  # noqa: B019
    def first(self, n, axis=0):
        """The first n entries along an axis."""
        shape = self.shape[:axis] + (n,) + self.shape[axis + 1 :]
        strides = None if axis == 0 and self.strides is None else self.byte_strides
        return Field(shape, self.dtype, self.offset, strides)


class DeviceArray:
    """A result in GPU memory: address, shape [elements], dtype, strides [bytes] or None for C order.

    torch takes it with `torch.from_dlpack`, CuPy with `cupy.asarray` or `cupy.from_dlpack`, a `@cuda.jit` kernel with
    `numba()`; `numpy()` waits for the GPU and copies. The memory stays lent until this array, and everything made from
    it, is gone.
    """

    __slots__ = ("_owner", "_field", "__weakref__")

    def __init__(self, owner, field):
        """owner: a Loan; field: which part of it."""
        self._owner, self._field = owner, field

    def __repr__(self):
        return f"DeviceArray({self.shape}, {self.dtype}, GPU {self.ordinal}, 0x{self.address:x})"

    def __len__(self):
        return self.shape[0]

    address = property(lambda self: self._owner.base + self._field.offset, doc="Address of the first element.")
    ordinal = property(lambda self: self._owner.ordinal, doc="Number of the GPU.")
    shape = property(lambda self: self._field.shape, doc="A tuple of ints.")
    dtype = property(lambda self: self._field.dtype, doc="NumPy's or ml_dtypes'.")
    strides = property(lambda self: self._field.strides, doc="In bytes, None for C order.")
    nbytes = property(lambda self: self._field.nbytes, doc="Bytes of the elements.")

    @property
    def __cuda_array_interface__(self):
        typestr, data = self.dtype.str, (self.address, False)
        return dict(shape=self.shape, typestr=typestr, data=data, strides=self.strides, version=3)

    def __dlpack_device__(self):
        return (2, self.ordinal)  # kDLCUDA

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        form = self.shape, self.strides, self.dtype, self.__dlpack_device__()
        return capsule(self.address, *form, self._owner)

    def numba(self):
        """The same memory as Numba's device array, for arguments of @cuda.jit kernels; no copy, and nothing waits.

        bf16 elements are Numba's bfloat16; FP8 values and scales, which Numba has no type for, are uint8.
        """
        from numba import cuda

        interface, is_own = self.__cuda_array_interface__, self.dtype.kind == "V"  # of ml_dtypes
        if is_own:
            interface["typestr"] = f"<u{self.dtype.itemsize}"
        array = cuda.from_cuda_array_interface(interface, owner=self)
        return array.view(self.dtype) if is_own and self.dtype.itemsize > 1 else array

    def first(self, n, axis=0):
        """The first n entries along an axis: the same memory, no copy."""
        return DeviceArray(self._owner, self._field.first(n, axis))

    def numpy(self):
        """The values as a NumPy array (a copy); waits for the GPU."""
        loan, field = self._owner, self._field
        if 0 in field.shape:
            return np.empty(field.shape, field.dtype)
        raw = loan.buffer.read(np.uint8, (field.span,), loan.start + field.offset)
        return np.ndarray(field.shape, field.dtype, raw, strides=field.byte_strides).copy()


def view(obj, what):
    """Any array as an `Array`; `what` names it in messages. Raises EPValueError if obj is not an array."""
    if isinstance(obj, Array):
        return obj
    if isinstance(obj, DeviceArray):
        return Array(None, obj.address, obj.shape, obj.dtype, obj.ordinal, obj.strides, obj)
    if isinstance(obj, np.ma.MaskedArray):
        raise EPValueError(f"{what} is a masked array, and its mask would be lost: fill it, array.filled(value)")
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj)
    if hasattr(obj, "data_ptr") and str(getattr(obj, "dtype", "")).startswith("torch."):  # torch may not be installed
        return _from_torch(obj, what)
    if hasattr(obj, "__cuda_array_interface__"):
        return _from_cuda(obj)
    if hasattr(obj, "__dlpack__") and not isinstance(obj, type):
        return _from_dlpack(obj, what)
    if hasattr(obj, "output_tokens"):
        kind = type(obj).__name__
        raise EPValueError(f"{what} is a {kind}: pass one of its arrays, like d.output_tokens, or your experts' result")
    is_list = isinstance(obj, (list, tuple))
    remedy = "; convert a list of numbers with np.asarray (only a LocalWorld takes lists over ranks)" if is_list else ""
    raise EPValueError(
        f"{what} is a {type(obj).__name__}, which is no array that can be read here: give a NumPy "
        f"array, or anything with __dlpack__ or __cuda_array_interface__ (torch, CuPy){remedy}"
    )


def look(arrays, names):
    """(form of each array, addresses, arrays), see PEEKS."""
    forms, addresses, seen = [], [], []
    for a, name in zip(arrays, names):
        form, address, array = PEEKS[type(a)](a, name)
        forms.append(form)
        addresses.append(address)
        seen.append(array)
    return tuple(forms), addresses, seen


def to_numpy(array):
    """Values of a result array, NumPy or DeviceArray, as NumPy; None stays None."""
    return array.numpy() if isinstance(array, DeviceArray) else array


def first(array, n, axis=0):
    """The first n entries along an axis of a result array, NumPy or DeviceArray, without a copy."""
    if isinstance(array, DeviceArray):
        return array.first(n, axis)
    return array[(slice(None),) * axis + (slice(n),)]


class _Peeks(dict):
    def __missing__(self, kind):
        return _peek_any


def _peek_any(obj, what):
    array = view(obj, what)
    way = PEEKS.setdefault(type(obj), _peek_any)  # view() has entered the type of the first tensor
    if way is not _peek_any:
        return way(obj, what)
    return array.form, None if array.host is not None else array.address, array


def _peek_device(a, what):
    loan, field = a._owner, a._field
    return field.form + (loan.piece.pool.machine.ordinal,), loan.base + field.offset, a


def _peek_torch(t, what):
    device = t.get_device()
    if device < 0:
        array = _from_torch(t, what)
        return array.form, None, array
    at = t.data_ptr()
    return (t.shape, t.dtype, t.is_contiguous(), device, at % VECTOR_BYTES), at, t


def _from_numpy(a):
    strides = None if a.flags.c_contiguous else a.strides
    return Array(a, a.ctypes.data, a.shape, a.dtype, None, strides, a)


def _from_torch(t, what):
    dtype = _TORCH_DTYPES.get(str(t.dtype))
    if dtype is None:
        raise EPValueError(f"{what} has dtype {t.dtype}, which epmoe does not know")
    PEEKS[type(t)] = _peek_torch
    if t.is_cuda:
        strides = None if t.is_contiguous() else tuple(s * dtype.itemsize for s in t.stride())
        return Array(None, t.data_ptr(), tuple(t.shape), dtype, t.get_device(), strides, t)
    if str(t.layout) != "torch.strided" or t.device.type != "cpu":
        raise EPValueError(
            f"{what} is a tensor with layout {t.layout} on device {t.device}: give a dense one "
            "(to_dense()) on a CPU or CUDA device"
        )
    import torch

    try:  # torch has no NumPy bfloat16: look at the same memory as integers
        raw = t.detach().view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy()
    except RuntimeError as e:
        raise EPValueError(f"{what} is a tensor that NumPy cannot view: give a plain one") from e
    return _from_numpy(raw.view(dtype))


def _from_cuda(obj):
    interface = obj.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V":  # ml_dtypes' types have no typestr, so ask the object
        own = getattr(obj, "dtype", None)
        dtype = np.dtype(own) if isinstance(own, (np.dtype, type)) else np.dtype(bfloat16)
    device = getattr(getattr(obj, "device", None), "id", None)
    shape = tuple(interface["shape"])
    strides = _unless_c_order(shape, interface.get("strides"), dtype.itemsize)
    return Array(None, int(interface["data"][0]), shape, dtype, device, strides, obj)


def _from_dlpack(obj, what):
    kind, ordinal = obj.__dlpack_device__()
    if kind == 1:  # kDLCPU
        try:
            return _from_numpy(np.from_dlpack(obj))
        except (BufferError, RuntimeError, TypeError) as e:
            raise EPValueError(f"{what}: NumPy cannot take this DLPack array ({e}); give it as a NumPy array") from None
    if kind not in (2, 13):  # kDLCUDA, kDLCUDAManaged
        raise EPValueError(f"{what} lives on DLPack device type {int(kind)}; epmoe reads host memory (1) and CUDA (2)")
    from cuda.core.utils import StridedMemoryView

    seen = StridedMemoryView.from_dlpack(obj, stream_ptr=-1)
    dtype, shape, strides = np.dtype(seen.dtype), tuple(seen.shape), seen.strides
    strides = strides and [s * dtype.itemsize for s in strides]
    strides = _unless_c_order(shape, strides, dtype.itemsize)
    return Array(None, int(seen.ptr), shape, dtype, seen.device_id, strides, seen)


def c_strides(shape, itemsize):
    """Strides in C order, in the unit that itemsize has."""
    return tuple(itemsize * prod(shape[i + 1 :]) for i in range(len(shape)))


def _unless_c_order(shape, strides, itemsize):
    """The strides, or None for C order (axes of length 1 and empty arrays do not count)."""
    axes = zip(shape, strides or (), c_strides(shape, itemsize))
    is_ordered = 0 in shape or all(n == 1 or s == c for n, s, c in axes)
    return None if is_ordered else tuple(strides)


# PEEKS[type(obj)](obj, what) is (form, address, array) of any array, faster than view(). form: all that decides whether
# an array is accepted, but its values. In host memory the address is None, and array an Array.
PEEKS = _Peeks({DeviceArray: _peek_device})
