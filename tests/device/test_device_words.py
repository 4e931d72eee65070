"""Every intrinsic works the same in the simulator and (-m gpu) on a GPU: one table for both."""

import pytest
from run_case import run
from word_cases import CASES

from epmoe import device
from epmoe.device import names


def test_the_table_has_every_word():
    assert set(CASES) == set(names.WORDS) and len(names.WORDS) == len(set(names.WORDS))
    assert set(names.WORDS) | set(names.DTYPES.split()) < set(device.__all__)


@pytest.mark.parametrize("name", sorted(CASES))
def test_word_in_the_simulator(name):
    run(CASES[name], seed=None)


@pytest.mark.parametrize("name", sorted(CASES))
def test_word_in_the_simulator_with_the_race_detector(name):
    run(CASES[name], seed=1, racecheck=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_word_on_a_gpu(name):
    run(CASES[name])
