"""An ExpertParallel of two ranks with the smallest launches, and a batch for it.

epmoe is imported late: pytest may read this before it knows which device the tests run on.
"""

import pytest


@pytest.fixture
def ep():
    from worlds_at_hand import config, parallel

    with parallel(config()) as made:
        yield made


@pytest.fixture
def made_batch():
    from worlds_at_hand import batch, config

    return batch(config())


@pytest.fixture
def x(made_batch):
    return made_batch[0]


@pytest.fixture
def ids(made_batch):
    return made_batch[1]


@pytest.fixture
def weights(made_batch):
    return made_batch[2]
