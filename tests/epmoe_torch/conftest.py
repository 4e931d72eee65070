"""What tests of one rank are given. torch is imported late: pytest reads this also where there is none."""

import pytest


@pytest.fixture
def group():
    """A group of one rank a process."""
    from small_tensors import OneRank

    return OneRank()


@pytest.fixture
def draw():
    """A generator of random numbers, the same in every test."""
    import torch

    return torch.Generator().manual_seed(1)
