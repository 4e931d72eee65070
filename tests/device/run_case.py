"""Run one case of intrinsic_cases on the machine of this process, and compare."""

import numpy as np
from case_table import OUT

from epmoe import device


def run(case, **options):
    """Launch the case's kernel and compare the memory afterwards."""
    machine = device.machine(1, **options)
    buffer = machine.alloc(2 * OUT, "case")
    try:
        buffer.fill(0)
        buffer.write(case.inputs)
        machine.launch(
            case.kernel,
            case.grid,
            case.block,
            (buffer.address, case.block, 0),
            stream=machine.stream(0),
            shared_bytes=case.shared_bytes,
        )
        machine.synchronize()
        same(buffer.read(case.expected.dtype, case.expected.shape, OUT), case.expected, case)
        if case.left is not None:
            same(buffer.read(case.left.dtype, case.left.shape), case.left, case)
    finally:
        buffer.free()


def same(got, expected, case):
    if case.close:
        ulps = np.abs(got.view(np.int32).astype(np.int64) - expected.view(np.int32).astype(np.int64))
        assert (ulps <= 2).all(), "%s: %s instead of %s" % (case.intrinsic, got, expected)
    else:
        equal = got == expected
        if got.dtype == np.float32:
            equal = (got.view(np.uint32) == expected.view(np.uint32)) | np.isnan(got) & np.isnan(expected)
        assert equal.all(), "%s: %s instead of %s at %s" % (
            case.intrinsic,
            got[~equal],
            expected[~equal],
            np.argwhere(~equal).ravel(),
        )
