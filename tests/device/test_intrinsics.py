"""Every intrinsic works the same in the simulator and (-m gpu) on a GPU: one table for both."""

import numpy as np
import pytest
from case_table import OUT
from intrinsic_cases import CASES

from epmoe import device
from epmoe.device import intrinsics


def run(case, **options):
    """Launch the case's kernel and compare the memory afterwards."""
    machine = device.machine(1, **options)
    buffer = machine.alloc(2 * OUT, "case")
    try:
        buffer.fill(0)
        buffer.write(case.inputs)
        given = (buffer.address, case.block, 0)
        machine.launch(
            case.kernel, case.grid, case.block, given, stream=machine.stream(0), shared_bytes=case.shared_bytes
        )
        machine.synchronize()
        same(buffer.read(case.expected.dtype, case.expected.shape, OUT), case.expected, case.close)
        if case.left is not None:
            same(buffer.read(case.left.dtype, case.left.shape), case.left, case.close)
    finally:
        buffer.free()


def same(got, expected, close):
    if close:
        ulps = np.abs(got.view(np.int32).astype(np.int64) - expected.view(np.int32).astype(np.int64))
        equal = ulps <= 2
    else:
        equal = got == expected
        if got.dtype == np.float32:
            equal = (got.view(np.uint32) == expected.view(np.uint32)) | np.isnan(got) & np.isnan(expected)
    assert equal.all(), f"{got[~equal]} instead of {expected[~equal]} at {np.argwhere(~equal).ravel()}"


def test_the_table_has_every_intrinsic():
    assert sorted(CASES) == sorted(intrinsics.INTRINSICS)
    assert set(intrinsics.INTRINSICS) | set(intrinsics.DTYPES.split()) < set(device.__all__)


@pytest.mark.parametrize("options", [dict(seed=None), dict(seed=1, racecheck=True)], ids=["plain", "race detector"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_intrinsic_in_the_simulator(name, options):
    run(CASES[name], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_intrinsic_on_a_gpu(name):
    run(CASES[name])
