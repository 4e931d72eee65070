"""Every intrinsic works the same in the simulator and (-m gpu) on a GPU: one table for both."""

import pytest
from intrinsic_cases import CASES
from run_case import run

from epmoe import device
from epmoe.device import intrinsics


def test_the_table_has_every_intrinsic():
    assert sorted(CASES) == sorted(intrinsics.INTRINSICS)
    assert set(intrinsics.INTRINSICS) | set(intrinsics.DTYPES.split()) < set(device.__all__)


@pytest.mark.parametrize("name", sorted(CASES))
def test_intrinsic_in_the_simulator(name):
    run(CASES[name], seed=None)


@pytest.mark.parametrize("name", sorted(CASES))
def test_intrinsic_in_the_simulator_with_the_race_detector(name):
    run(CASES[name], seed=1, racecheck=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_intrinsic_on_a_gpu(name):
    run(CASES[name])
