"""Ids of every integer type become int32 on the device, and what int32 cannot hold stays outside every range."""

import numpy as np
import pytest

from epmoe import device
from epmoe.device.cast_ids import OUTSIDE, cast_ids

# around what each type can hold
INTERESTING = [0, 1, -1, 2, 2**31 + 5, 2**32 + 3]
INTERESTING += [edge for n in (7, 8, 15, 16, 31, 32, 63, 64) for edge in (2**n - 1, 2**n, -(2**n), -(2**n) - 1)]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ids_are_kept_or_marked(dtype):
    info = np.iinfo(dtype)
    values = [v for v in INTERESTING if info.min <= v <= info.max] * 3
    machine = device.machine(1)
    source = machine.alloc(len(values) * np.dtype(dtype).itemsize, "ids")
    destination = machine.alloc(4 * len(values), "int32 ids")
    source.write(np.array(values, dtype))
    launch = cast_ids(machine, machine.stream(0), 0, dtype, len(values))
    launch.start(source.address, destination.address)
    got = destination.read(np.int32, (len(values),))
    assert got.tolist() == [v if -(2**31) <= v < 2**31 else OUTSIDE for v in values]
    for buffer in (source, destination):
        buffer.free()
