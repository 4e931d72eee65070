"""Rounding functions for the caller's functions: epmoe.device's in kernels; on the host they also take arrays.

What is too large for float32 is the infinity that IEEE says, without a warning, as in kernels.
"""

import numpy as np

from epmoe import device


def _as_on_the_host(word):
    # inside simulated kernels nothing warns; a word of the GPU must stay what it is, and has its own way on the host
    return np.errstate(all="ignore")(word) if device.SIM else word


mul_rn, add_rn, fma_rn = map(_as_on_the_host, (device.mul_rn, device.add_rn, device.fma_rn))
