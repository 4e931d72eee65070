"""Is there a GPU that kernels can run on? Asked before anything is chosen: no context is made by it."""

import importlib.util


def gpu_present():
    """True if numba-cuda is installed and the CUDA driver reports a device."""
    if importlib.util.find_spec("numba_cuda") is None:
        return False
    try:
        from .gpu_driver import check, cu  # sets what the driver reads when it starts

        check(cu.cuInit(0))
        return check(cu.cuDeviceGetCount()) > 0
    except Exception:  # there is no driver, or no device
        return False
