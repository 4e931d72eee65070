"""An ExpertParallel of two ranks in the simulator's smallest grid, and a batch for it."""

import pytest
from worlds_at_hand import batch, config, parallel


@pytest.fixture
def ep():
    with parallel(config()) as made:
        yield made


@pytest.fixture
def x():
    return batch(config())[0]


@pytest.fixture
def ids():
    return batch(config())[1]


@pytest.fixture
def weights():
    return batch(config())[2]
