"""Prints as JSON what a plain kernel is like that was made of the disk cache's machine code; needs no GPU."""

import json
import sys

from epmoe.device import gpu_array_kernel
from epmoe.device.gpu_kernel import _as_if_on
from epmoe.kernels import plain
from epmoe_ref.config import EPConfig

CC = 9, 0


def compiled(**sizes):
    """(kernel, its argument types) of a configuration."""
    made = plain.combine_wait_kernel(EPConfig(2, 16, 4, 256, 32, **sizes))
    return made.kernel, tuple(map(gpu_array_kernel.type_of, made._compiled_for({})))


if __name__ == "__main__":
    kernel, given = compiled()
    key = gpu_array_kernel.Compiled(kernel, given)
    name, cubin = key.binary(CC)
    with _as_if_on(CC):
        again = gpu_array_kernel._kernel_of(given, CC, name, cubin)
        same_code = again._codelibrary.get_cubin().code == cubin  # as a launch asks for it
    kernel.numba.add_overload(again, given)
    other = gpu_array_kernel.Compiled(*compiled(combine_dtype="fp32"))
    json.dump(
        dict(
            types=again.argument_types == given,
            code=same_code,
            entry=again.entry_name == name,
            found=kernel.numba.overloads[given] is again,
            equal=key.fingerprint(CC) is not None
            and key.fingerprint(CC) == gpu_array_kernel.Compiled(*compiled()).fingerprint(CC),
            differs=key.fingerprint(CC) != other.fingerprint(CC),
        ),
        sys.stdout,
    )
