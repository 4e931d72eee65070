"""A CUDA driver that only keeps count, so that the host side of a call can be measured without a GPU.

Memory is host memory, launches are recorded and not run. What it stands for is the interface of
cuda.bindings.driver that epmoe.device uses. FakeTensor stands for a torch tensor in GPU memory: the same
attributes and methods, of the same meaning.
"""

import ctypes
import gc
import threading
import types
from itertools import repeat

import numpy as np

ADDRESS_ALIGNMENT = 256  # bytes
NO_CAPTURE = 0
KERNELS = []  # (name, words of params) of those that are loaded, by number, which is their handle


class Driver:
    """Stands for the module cuda.bindings.driver; `calls` lists the names of calls, `launches` what was launched.

    capture: id of the capture that every stream but the legacy default one is in; NO_CAPTURE for none.
    """

    def __init__(self, real):
        self._real, self.calls, self.launches, self.capture = real, [], [], NO_CAPTURE
        self.launch_result = real.CUresult.CUDA_SUCCESS
        self.waited_for, self.copied_on = set(), set()  # handles of streams
        self.threads = {threading.get_ident()}  # those with a current context
        self._memory = {}  # address -> (array, bytes)
        self.fills = []  # (bytes, handle of the stream)
        self._success = (real.CUresult.CUDA_SUCCESS,)

    def __getattr__(self, name):
        if name.startswith("CU"):  # types and constants
            setattr(self, name, getattr(self._real, name))
            return getattr(self._real, name)
        if not name.startswith("cu"):
            raise AttributeError(name)

        def count(*args):
            self.calls.append(name)
            return self._success[0], 1

        setattr(self, name, count)
        return count

    def cuMemAlloc(self, nbytes):
        self.calls.append("cuMemAlloc")
        raw = np.full(nbytes + ADDRESS_ALIGNMENT, 0xA5, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % ADDRESS_ALIGNMENT
        self._memory[address] = raw, nbytes
        return self._success[0], address

    def cuMemHostAlloc(self, nbytes, flags):
        return self.cuMemAlloc(nbytes)

    def cuMemFreeHost(self, address):
        return self.cuMemFree(address)

    def cuMemFree(self, address):
        self.calls.append("cuMemFree")
        del self._memory[address]
        return self._success

    def cuMemcpyHtoDAsync(self, to, source, nbytes, stream):
        self.calls.append("cuMemcpyHtoDAsync")
        self.copied_on.add(int(stream))
        ctypes.memmove(to, source, nbytes)
        return self._success

    def cuMemcpyDtoHAsync(self, to, source, nbytes, stream):
        self.calls.append("cuMemcpyDtoHAsync")
        ctypes.memmove(to, source, nbytes)
        return self._success

    def cuMemsetD8Async(self, to, byte, nbytes, stream):
        self.calls.append("cuMemsetD8Async")
        self.fills.append((nbytes, int(stream)))
        ctypes.memset(to, byte, nbytes)
        return self._success

    def cuStreamSynchronize(self, stream):
        self.calls.append("cuStreamSynchronize")
        self.waited_for.add(int(stream))
        return self._success

    def cuStreamIsCapturing(self, stream):
        status = self._real.CUstreamCaptureStatus
        is_captured = self.capture and int(stream) != 0
        return self._success[0], status(int(bool(is_captured)))

    def cuCtxSetCurrent(self, context):
        self.threads.add(threading.get_ident())
        return self._success

    def cuStreamGetCaptureInfo(self, stream):
        status = self._real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return self._success[0], status, self.capture, None, [], []

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return self._success[0], mode

    def cuGetErrorString(self, code):
        return self._success[0], b"counted"

    def cuFuncGetAttribute(self, attribute, function):
        return self._success[0], 0

    def cuDeviceGetAttribute(self, attribute, device):
        return self._success[0], 227 * 1024

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared_bytes):
        return self._success[0], 1

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        """Records (kernel, grid, block, stream, words of params, num_tokens, my_rank). config: a CUlaunchConfig."""
        if threading.get_ident() not in self.threads:
            return (self._real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        words, *numbers = _arguments(function, arguments)
        stream = int(config.hStream)
        self.launches.append((function, config.gridDimX, config.blockDimX, stream, words, *numbers))
        if function == "tell_host":
            self.tell(words)
        return (self.launch_result,)

    def tell(self, words):
        """What tell_host does, which the host waits for."""
        word, number, at, *arrays = words
        for source, n_words in zip(arrays[::2], arrays[1::2]):
            ctypes.memmove(at, source, 4 * n_words)
            at += 4 * n_words
        ctypes.c_uint64.from_address(word).value = number

    def allocated(self):
        """[(address, bytes)] of what is allocated."""
        return [(address, nbytes) for address, (_, nbytes) in self._memory.items()]

    def memory_at(self, address):
        """The bytes of an allocation from an address on."""
        (nbytes,) = [start + n - address for start, (_, n) in self._memory.items() if start <= address < start + n]
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _arguments(function, at):
    """(words of params, number of tokens, rank)."""
    n = function.n_words or 1
    pointers = (ctypes.c_void_p * (n + 2)).from_address(at)
    words = tuple(ctypes.c_uint64.from_address(pointer).value for pointer in pointers[:n])
    return words, *(ctypes.c_int32.from_address(pointer).value for pointer in pointers[n:])


class Function(str):
    """A kernel on the device: its name, and as an int its number."""

    def __new__(cls, number):
        name, n_words = KERNELS[number]
        made = super().__new__(cls, name)
        made.number, made.n_words = number, n_words
        return made

    def __int__(self):
        return self.number


class FakeDtype:
    """Stands for a torch.dtype."""

    def __init__(self, name):
        self._name = name

    def __repr__(self):
        return f"torch.{self._name}"


bfloat16, float32, int32, int64 = (FakeDtype(name) for name in ("bfloat16", "float32", "int32", "int64"))


class FakeTensor:
    """Stands for a torch tensor in GPU memory, or in host memory (device_index -1)."""

    def __init__(self, address, shape, dtype, device_index=0, stride=None):
        self.shape, self.dtype = tuple(shape), dtype
        c_order = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        self._stride = stride or c_order
        # Built-in functions that always return the same, since torch's methods are no Python functions either.
        self.data_ptr, self.get_device = repeat(address).__next__, repeat(device_index).__next__
        self.is_contiguous = repeat(self._stride == c_order).__next__
        self.device = types.SimpleNamespace(index=device_index)
        self.is_cuda = device_index >= 0

    def stride(self):
        return self._stride


def counted_machine(n_ranks, rank):
    """(machine, driver): a GpuMachine over a Driver; needs EPMOE_DEVICE=gpu, a process of its own, and no GPU."""
    from numba import cuda

    from epmoe.device import gpu_driver, gpu_kernel, gpu_launch, gpu_machine, gpu_memory

    gc.collect()  # while the driver before, if there was one, knows what is freed
    real = gpu_driver.cu
    driver = Driver(real)
    device = types.SimpleNamespace(id=0, name="counted", MULTIPROCESSOR_COUNT=132, compute_capability=(9, 0))

    def entry_only(kernel, cc):
        KERNELS.append((kernel.name, kernel.n_words))
        return kernel.name, b""

    for module in (gpu_driver, gpu_launch, gpu_memory, gpu_machine):
        module.cu = driver
    gpu_kernel.Kernel.binary = entry_only
    driver.cuKernelGetFunction = lambda _: (real.CUresult.CUDA_SUCCESS, Function(len(KERNELS) - 1))
    cuda.current_context = lambda *_: types.SimpleNamespace(device=device)
    return gpu_machine.GpuMachine(n_ranks, rank=rank), driver
