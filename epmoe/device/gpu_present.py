"""Is there a GPU that kernels can run on? Asked before a device is chosen. It makes no context."""

import importlib.util


def gpu_present():
    """True if numba-cuda is installed and the CUDA driver reports a device."""
    if importlib.util.find_spec("numba_cuda") is None:
        return False
    try:
        from .gpu_driver import check, cu  # sets variables that the driver reads at its start

        check(cu.cuInit(0))
        return check(cu.cuDeviceGetCount()) > 0
    except Exception:  # there is no driver, or no device
        return False
