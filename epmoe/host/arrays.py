"""Arrays from anywhere, seen in one way (NumPy, torch, CuPy, DLPack, CUDA array interface), and our DeviceArray."""

from dataclasses import dataclass, field
from math import prod

import ml_dtypes
import numpy as np

from epmoe_ref.errors import EPValueError

_TORCH_DTYPES = {
    f"torch.{t}": np.dtype(getattr(ml_dtypes, t)) for t in ("bfloat16", "float8_e4m3fn")
} | {
    f"torch.{t}": np.dtype(t)
    for t in "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
}


@dataclass(frozen=True)
class Array:
    """One array of the caller: where it is, what it holds. `host` is the NumPy array, or None for device memory.

    `strides` are in bytes, None where the array is C-contiguous. `owner` keeps the memory alive.
    """

    host: np.ndarray | None
    address: int
    shape: tuple
    dtype: np.dtype
    device: int | None
    strides: tuple | None
    owner: object = field(repr=False)

    @property
    def is_contiguous(self):
        """Whether it lies in C order without gaps."""
        return self.strides is None


class DeviceArray:
    """A result in GPU memory: address, shape [elements], dtype, strides [bytes] or None for C order.

    torch takes it with `torch.from_dlpack`, CuPy with `cupy.asarray` or `cupy.from_dlpack`, a `@cuda.jit` kernel with
    `numba()`; `numpy()` waits for the GPU and copies. The memory stays lent to it (and to everything made from it) until the last of them is gone.
    """

    def __init__(self, address, shape, dtype, *, owner, read, ordinal=0, strides=None):
        self.address, self.shape, self.dtype = int(address), tuple(shape), np.dtype(dtype)
        self.strides, self.ordinal = strides, ordinal
        self._owner, self._read = owner, read
        # everything that decides how it is treated as an argument, for comparison
        self.seen = self.address, self.shape, self.dtype, strides, ordinal

    def __repr__(self):
        return f"DeviceArray({self.shape}, {self.dtype}, GPU {self.ordinal}, 0x{self.address:x})"

    def __len__(self):
        return self.shape[0]

    @property
    def nbytes(self):
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def _byte_strides(self):
        if self.strides is not None:
            return self.strides
        return c_strides(self.shape, self.dtype.itemsize)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": self.strides,
            "version": 3,
        }

    def __dlpack_device__(self):
        return (2, self.ordinal)  # kDLCUDA

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        from epmoe.host.dlpack import capsule

        strides = tuple(s // self.dtype.itemsize for s in self._byte_strides)
        return capsule(
            self.address, self.shape, strides, self.dtype, self.__dlpack_device__(), self
        )

    def numba(self):
        """The same memory as Numba's device array, for arguments of @cuda.jit kernels; no copy, and nothing waits.

        bf16 elements are Numba's bfloat16; FP8 values and scales, which Numba has no type for, are uint8.
        """
        from numba import cuda

        own = self.dtype.kind == "V"  # of ml_dtypes
        interface = self.__cuda_array_interface__
        array = cuda.from_cuda_array_interface(
            interface | {"typestr": f"<u{self.dtype.itemsize}"} if own else interface, owner=self
        )
        return array.view(self.dtype) if own and self.dtype.itemsize > 1 else array

    def first(self, n, axis=0):
        """The first n entries along an axis: the same memory, no copy."""
        shape = self.shape[:axis] + (n,) + self.shape[axis + 1 :]
        strides = None if axis == 0 and self.strides is None else self._byte_strides
        return DeviceArray(
            self.address,
            shape,
            self.dtype,
            owner=self._owner,
            read=self._read,
            ordinal=self.ordinal,
            strides=strides,
        )

    def numpy(self):
        """The values as a NumPy array (a copy); waits for the GPU."""
        strides = self._byte_strides
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        span = sum((n - 1) * s for n, s in zip(self.shape, strides)) + self.dtype.itemsize
        raw = self._read(self.address, span)
        return np.ndarray(self.shape, self.dtype, raw, strides=strides).copy()


_new_array = DeviceArray.__new__


def lent_again(arrays, owner, read):
    """[the same DeviceArrays of the same memory, which `owner` keeps now], in less time than making them takes."""
    again = []
    for array in arrays:
        one = _new_array(DeviceArray)
        one.__dict__ = own = array.__dict__.copy()
        own["_owner"], own["_read"] = owner, read
        again.append(one)
    return again


def view(obj, what):
    """See any array as `Array`; what names it in messages. Raises EPValueError for things that are no array."""
    if isinstance(obj, DeviceArray):
        return Array(None, obj.address, obj.shape, obj.dtype, obj.ordinal, obj.strides, obj)
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj)
    if is_torch(obj):
        return _from_torch(obj, what)
    if hasattr(obj, "__cuda_array_interface__"):
        return _from_cuda(obj)
    if hasattr(obj, "__dlpack__") and not isinstance(obj, type):
        return _from_dlpack(obj, what)
    raise EPValueError(
        f"{what} is a {type(obj).__name__}, which is no array that can be read here: give a NumPy "
        "array, or anything with __dlpack__ or __cuda_array_interface__ (torch, CuPy)"
    )


def is_torch(obj):
    """Whether an object is a torch tensor, told without torch."""
    return hasattr(obj, "data_ptr") and str(getattr(obj, "dtype", "")).startswith("torch.")


def to_numpy(array):
    """Values of a result array, NumPy or DeviceArray, as NumPy; None stays None."""
    return array.numpy() if isinstance(array, DeviceArray) else array


def first(array, n, axis=0):
    """The first n entries along an axis of a result array, NumPy or DeviceArray, without a copy."""
    if isinstance(array, DeviceArray):
        return array.first(n, axis)
    return array[(slice(None),) * axis + (slice(n),)]


def _from_numpy(a):
    return Array(
        a, a.ctypes.data, a.shape, a.dtype, None, None if a.flags.c_contiguous else a.strides, a
    )


def _from_torch(t, what):
    dtype = _TORCH_DTYPES.get(str(t.dtype))
    if dtype is None:
        raise EPValueError(f"{what} has dtype {t.dtype}, which epmoe does not know")
    strides = None if t.is_contiguous() else tuple(s * dtype.itemsize for s in t.stride())
    if t.is_cuda:
        return Array(None, t.data_ptr(), tuple(t.shape), dtype, t.device.index, strides, t)
    if str(t.layout) != "torch.strided" or t.device.type != "cpu":
        raise EPValueError(
            f"{what} is a tensor with layout {t.layout} on device {t.device}: give a dense one "
            "(to_dense()) on a CPU or CUDA device"
        )
    # torch has no NumPy bfloat16: look at the same memory as bytes
    import torch

    t = t.detach().contiguous()
    raw = t.reshape(-1).view(torch.uint8).numpy() if t.numel() else np.empty(0, np.uint8)
    return _from_numpy(raw.view(dtype).reshape(tuple(t.shape)))


def _from_cuda(obj):
    interface = obj.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V":  # ml_dtypes' types have no code of their own: the object itself knows
        own = getattr(obj, "dtype", None)
        dtype = np.dtype(own) if isinstance(own, (np.dtype, type)) else np.dtype(ml_dtypes.bfloat16)
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
            raise EPValueError(
                f"{what}: NumPy cannot take this DLPack array ({e}); give it as a NumPy array"
            ) from None
    if kind not in (2, 13):  # kDLCUDA, kDLCUDAManaged
        raise EPValueError(
            f"{what} lives on DLPack device type {int(kind)}; epmoe reads host memory (1) and CUDA (2)"
        )
    from cuda.core.utils import StridedMemoryView

    seen = StridedMemoryView.from_dlpack(obj, stream_ptr=-1)
    dtype = np.dtype(seen.dtype)
    strides = None if seen.strides is None else tuple(s * dtype.itemsize for s in seen.strides)
    strides = _unless_c_order(tuple(seen.shape), strides, dtype.itemsize)
    return Array(None, int(seen.ptr), tuple(seen.shape), dtype, seen.device_id, strides, seen)


def c_strides(shape, itemsize):
    """Strides in C order, in the unit of itemsize."""
    return tuple(itemsize * prod(shape[i + 1 :]) for i in range(len(shape)))


def _unless_c_order(shape, strides, itemsize):
    """The strides, or None if they are those of C order (axes of length 1 and empty arrays have no say)."""
    if strides is None or 0 in shape:
        return None
    ordered = all(n == 1 or s == c for n, s, c in zip(shape, strides, c_strides(shape, itemsize)))
    return None if ordered else tuple(strides)
