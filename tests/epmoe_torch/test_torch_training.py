"""A two-layer MoE block, trained by expert parallelism, is the same block computed in one place."""

import math

import pytest
import torch
from moe_block import batches_of, densely, layers_of, parallel, together, train
from small_tensors import DEVICE, group_of

SIZES = dict(hidden=8, width=16, n_experts=4)
NUM_TOKENS = (4, 3)
LR = 0.003

pytestmark = pytest.mark.timeout(500)  # fifty steps under the race detector


def trained(kinds, steps, forward):
    """Layers after `steps` steps, and the losses on the way."""
    layers = layers_of(kinds, device=DEVICE, **SIZES)
    return layers, train(layers, forward, batches_of(steps, NUM_TOKENS, SIZES["hidden"], DEVICE), LR)


def assert_trained_alike(kinds, steps):
    layers, losses = trained(kinds, steps, parallel(group_of(2)))
    same, same_losses = trained(kinds, steps, together(2))
    assert losses == same_losses and all(map(math.isfinite, losses))
    for one, other in zip(layers, same):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters))
    return layers, losses


def test_fifty_steps_give_the_same_losses_and_parameters_to_the_bit():
    layers, losses = assert_trained_alike(("rows", "rows"), 50)
    assert losses[-1] < losses[0] / 2
    dense, dense_losses = trained(("rows", "rows"), 50, densely)
    # Every expert on every token sums in another order: bfloat16 (2**-9) at each of the sums of 50 steps.
    assert dense_losses == pytest.approx(losses, rel=2**-4)


def test_rows_by_expert_train_alike():
    assert_trained_alike(("hybrid", "rows"), 4)
