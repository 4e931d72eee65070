"""A two-layer MoE block, trained by expert parallelism, is the same block computed in one place."""

import pytest
import torch
from moe_block import batches_of, layers_of, parallel, together, train
from small_tensors import DEVICE, group_of

SIZES = dict(hidden=8, width=16, n_experts=4)
NUM_TOKENS = (4, 3)
STEPS, LR = 6, 0.02


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("hybrid", "rows")], ids=str)
def test_steps_give_the_same_losses_and_parameters_to_the_bit(kinds):
    def trained(forward):
        """Layers after all steps, and the losses on the way."""
        layers = layers_of(kinds, device=DEVICE, **SIZES)
        return layers, train(layers, forward, batches_of(STEPS, NUM_TOKENS, SIZES["hidden"], DEVICE), LR)

    layers, losses = trained(parallel(group_of(2)))
    same, same_losses = trained(together(2))
    assert losses == same_losses and losses[-1] < losses[0] / 2
    for one, other in zip(layers, same):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters))
