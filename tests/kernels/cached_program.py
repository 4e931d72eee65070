"""Prints as JSON what the kernels of arrays are like that the disk cache keeps; needs no GPU."""

import json
import sys

from epmoe.kernels import plain
from epmoe_ref.config import EPConfig

CC = 9, 0


def compiled(**sizes):
    """The Kernel of a configuration."""
    made = plain.combine_wait_kernel(EPConfig(2, 16, 4, 256, 32, **sizes))
    return made.kernel.of(made._compiled_for({}))


if __name__ == "__main__":
    kernel, other = compiled(), compiled(combine_dtype="fp32")
    name, cubin = kernel.binary(CC)
    found = compiled()
    json.dump(
        dict(
            found=found.binary(CC) == (name, cubin) and "_code" not in vars(found),
            code=cubin[:4] == b"\x7fELF" and name.encode() in cubin,
            equal=kernel.fingerprint(CC) is not None and kernel.fingerprint(CC) == found.fingerprint(CC),
            differs=kernel.fingerprint(CC) != other.fingerprint(CC),
        ),
        sys.stdout,
    )
