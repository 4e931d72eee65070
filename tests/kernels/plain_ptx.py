"""Compiles plain kernels for several devices without a GPU; prints {"kernel format sm": its PTX} as JSON.

With the argument `day` one kernel for some devices, with `night` two for every device. With `all` every kernel for every
format and device, as cubins: prints their number of bytes.
"""

import json
import sys

from epmoe.kernels import plain
from epmoe_ref.config import EPConfig

DEVICES = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)
FORMATS = "bf16", "fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"
KERNELS = [name for name in plain.__all__ if name.endswith("_kernel")]
SAMPLES = ("dispatch_kernel", "fp8_blockwise"), ("combine_kernel", "bf16")
BY_DAY = {"dispatch_kernel": ((7, 5), (8, 9))}


def made(kernel, token_format):
    cfg = EPConfig(2, 8, 2, 256, 6, token_format=token_format)
    reduces = kernel in ("combine_wait_kernel", "combine_kernel")
    return getattr(plain, kernel)(cfg, **(dict(router_weights_wrapper=plain.given_weights) if reduces else {}))


def arguments(kernel):
    import numpy as np

    from epmoe.host.arrays import Array

    weights = Array(None, 0, (1, 2), np.dtype(np.float32), None, None, None)
    return dict(router_weights_args=(weights,)) if kernel in ("combine_wait_kernel", "combine_kernel") else {}


def named(kernel, token_format, cc):
    return f"{kernel} {token_format} sm_{cc[0]}{cc[1]}"


if __name__ == "__main__":
    found = {}
    if sys.argv[1:] == ["all"]:
        for token_format in FORMATS:
            for kernel in KERNELS:
                k = made(kernel, token_format)
                for cc in DEVICES:
                    found[named(kernel, token_format, cc)] = len(k.cubin(cc, **arguments(kernel)))
    else:
        devices = BY_DAY if sys.argv[1:] == ["day"] else {kernel: DEVICES for kernel, _ in SAMPLES}
        for kernel, token_format in SAMPLES:
            k = made(kernel, token_format) if kernel in devices else None
            for cc in devices.get(kernel, ()):
                found[named(kernel, token_format, cc)] = k.ptx(cc, **arguments(kernel))
                assert k.cubin(cc, **arguments(kernel))[:4] == b"\x7fELF"
    print(json.dumps(found))
