"""Is there a GPU that kernels can run on? Asked before anything is chosen, so nothing is initialised by it."""

import ctypes
import importlib.util


def gpu_present():
    """True if numba-cuda is installed and the CUDA driver reports a device."""
    if importlib.util.find_spec("numba_cuda") is None:
        return False
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        count = ctypes.c_int(0)
        return (
            driver.cuInit(0) == 0
            and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
            and count.value > 0
        )
    return False
