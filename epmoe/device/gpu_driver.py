"""The CUDA driver's functions, from cuda.bindings, and the check of their results."""

import contextlib
import os

from epmoe_ref.errors import EPError

# virtual ranks wait for each other, so all of their streams must make progress
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# loading code while kernels wait for each other could hang
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

from cuda.bindings import driver as cu

SUCCESS = cu.CUresult.CUDA_SUCCESS


def check(result):
    """The values that a driver call returned. EPError with the error's name if it failed."""
    code = result[0]
    if code != SUCCESS:
        _, text = cu.cuGetErrorString(code)
        raise EPError(f"CUDA: {code.name} ({text.decode()})")
    return result[1] if len(result) == 2 else result[1:] or None


@contextlib.contextmanager
def outside_capture():
    """Driver calls inside run at once, even while a stream of this thread is being captured into a graph.

    Use it only for calls whose order does not matter to the captured work: allocating memory, copying into it.
    """
    before = check(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before))
